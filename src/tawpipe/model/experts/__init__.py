"""Experts of mixtures: their LoRA adapters."""
