"""Planning before a run: machines, measured costs, a search for strategy and settings, and the report."""
