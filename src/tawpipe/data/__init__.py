"""Text to tokens to rows of S tokens: deterministic, resumable by one integer, the same on every rank.

``tawpipe.data.prepare.prepare_data`` is the door. Nothing is imported here, so that settings load
without torch.
"""
