"""What is tried, and what is chosen."""
