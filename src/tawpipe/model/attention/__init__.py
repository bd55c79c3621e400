"""Attention through kernels, in chunks and in slots."""
