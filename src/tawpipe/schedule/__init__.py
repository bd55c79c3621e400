"""Schedule: the actions of every rank in one step, as data."""
