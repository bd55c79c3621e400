"""Text generation and the HTTP service. Training code uses it only through ``Pipeline.generate``."""
