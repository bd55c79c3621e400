"""Chats: rows of data become messages, and messages become text through a chat template."""
