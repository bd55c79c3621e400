"""Data pipeline: text to tokens to rows; deterministic, resumable from one integer, and equal on every rank.

The entry point is ``tawpipe.data.prepare.prepare_data``. This module imports nothing, so that settings load without
torch.
"""
