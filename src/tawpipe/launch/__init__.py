"""Start of a run's processes on this machine, and reports about their end."""
