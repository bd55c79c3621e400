"""Text to tokens to rows of S tokens: deterministic, resumable by one integer, the same on every rank.

``tawpipe.data.prepare.prepare_data`` is the door. Imports numpy, transformers, tokenizers and datasets, torch only to
make micro-batches; nothing of the schedule or the runtime. Nothing is imported here, so that settings load without
torch.
"""
