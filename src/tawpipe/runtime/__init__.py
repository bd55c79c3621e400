"""The runtime: one rank's part of a schedule, run for real. Imports topology, model and schedule."""
