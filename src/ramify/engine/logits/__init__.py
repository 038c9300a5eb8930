"""Logits processors and grammars."""
