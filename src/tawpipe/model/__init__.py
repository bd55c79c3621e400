"""A Hugging Face causal language model, unchanged, as a chain of blocks whose weights come and go.

Import from the files: ``batch`` (what one rank computes at once), ``build`` (a name to a model on the meta device),
``chain`` (blocks, and running them), ``units`` (what travels), ``weights`` (initial values), ``export`` (a Hugging Face
folder). Nothing is imported here, so that the data pipeline can use ``batch`` without loading transformers.
"""
