"""Solver for orders: its constraint model, its rounded costs, and its search."""
