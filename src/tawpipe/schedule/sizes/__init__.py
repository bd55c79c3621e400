"""Sizes of a schedule: bytes on links, memory of devices, activations at their most."""
