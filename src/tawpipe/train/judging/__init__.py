"""Judging of a run: evaluation, retrieval check and sample texts."""
