"""How the chain of blocks of a Hugging Face model is discovered."""
