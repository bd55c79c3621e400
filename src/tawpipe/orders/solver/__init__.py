"""The solver for orders, and its model."""
