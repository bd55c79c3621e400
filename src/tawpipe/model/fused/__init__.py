"""Functions that compute norms, rotary embeddings and gates of layers, and the places where a model uses them."""
