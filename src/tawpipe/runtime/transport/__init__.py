"""How weights, gradients and activations move between processes."""
