"""Attention of packed documents: by kernels, in chunks of a row, and in slots of a key-value cache."""
