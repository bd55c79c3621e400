"""Training runs: settings, preparation, the loop over steps, checkpoints, metrics and console output."""
