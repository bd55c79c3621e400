"""Homes: owners of master weights, gradients and optimizer state, and the updates made there."""
