"""Conversations whose tokens are kept."""
