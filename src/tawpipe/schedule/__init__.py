"""The schedule: what every rank does in one step, as data."""
