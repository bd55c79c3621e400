"""Strategies that move weights, the table of all strategies, and the functions that make steps of them."""
