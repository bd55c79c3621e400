"""Settings of a training run, and the checks of their values."""
