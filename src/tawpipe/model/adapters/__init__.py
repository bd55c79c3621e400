"""LoRA adapters on linear layers, computed with fewer passes over the output than in ``peft``."""
