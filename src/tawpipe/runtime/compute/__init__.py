"""How blocks compute: layers whole, in chunks and over sets of ranks; activations; random numbers."""
