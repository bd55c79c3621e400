"""Search for the best strategy and settings, and the plan that results."""
