"""Rivals of this project: strategies as torch and DeepSpeed ship them."""
