"""Computation of blocks: layers on whole rows, in chunks and in context-parallel groups; random numbers."""
