"""Draft proposers for speculative decoding."""
