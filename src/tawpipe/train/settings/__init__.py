"""Settings of a run, and their checks."""
