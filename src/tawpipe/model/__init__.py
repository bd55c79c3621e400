"""A Hugging Face causal language model as a chain of blocks whose weights are loaded for one visit at a time.

The model's own code is unchanged. Import from the files: ``batch`` (the tokens that one rank computes together),
``build`` (from a name to a model on the meta device), ``chain`` (the blocks, and running them), ``units`` (the
parameters that travel together), ``weights`` (initial values), ``export`` (a Hugging Face folder). This package imports
nothing itself, so that the data pipeline can use ``batch`` without loading transformers."""
