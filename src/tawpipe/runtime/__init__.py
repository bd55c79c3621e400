"""The runtime: one rank's part of a schedule, run for real."""
