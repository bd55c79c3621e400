"""Models, adapters and tokenizers: read from folders, and written to them."""
