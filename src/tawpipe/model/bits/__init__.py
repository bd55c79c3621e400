"""Weights in 4 or 8 bits: for training frozen layers, for generation, and in exported folders."""
