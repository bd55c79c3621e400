"""Training as a user sees it: settings, the loop, checkpoints, metrics and what is printed."""
