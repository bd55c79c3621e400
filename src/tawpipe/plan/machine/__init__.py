"""Machines on which a run computes: topology files, and measurements of links and devices."""
