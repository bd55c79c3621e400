"""What a plan says: longest rows, what is missing, pages."""
