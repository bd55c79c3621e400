"""Proof of a schedule: checks that it is right before it runs."""
