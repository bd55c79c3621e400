"""A cluster with unequal links out of one Linux machine."""
