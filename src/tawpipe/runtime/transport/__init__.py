"""Transport of weights, gradients and activations between ranks, plain or coded."""
