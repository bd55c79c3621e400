"""Cluster with unequal links, made out of one Linux machine."""
