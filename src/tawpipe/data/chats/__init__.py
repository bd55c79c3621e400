"""Rows of data as messages, and messages as text through a chat template."""
