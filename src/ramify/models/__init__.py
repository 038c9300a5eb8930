"""Decoders: their configuration, their layers and their weights."""
