"""Anthropic API."""
