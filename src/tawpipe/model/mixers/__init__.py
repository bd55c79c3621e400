"""Mixers of tokens other than attention, and how they keep documents apart."""
