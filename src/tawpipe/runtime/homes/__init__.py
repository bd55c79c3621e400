"""Where parameters, gradients and optimizer states live, and how they are updated."""
