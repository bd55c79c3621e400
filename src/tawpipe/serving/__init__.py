"""Generation and the service. Training reaches it through one door, ``Pipeline.generate``."""
