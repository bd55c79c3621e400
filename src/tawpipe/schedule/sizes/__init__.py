"""Costs of a schedule: bytes over links and memory of processes."""
