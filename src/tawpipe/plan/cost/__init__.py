"""Costs for planning: measured or estimated times and memory of blocks, and the prediction of a step."""
