"""Routes: transfers of weights and gradients, from the visits of a step."""
