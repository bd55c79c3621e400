"""Saved state: what is written, where it is kept, which of it is sound, and how a run goes on from it."""
