"""Llama: the defaults of `Family`, and of every family that differs by its row only. No torch."""

from __future__ import annotations

from ramify.models.configs.family import Family, llama_bias

LLAMA = Family(model_type="llama", biases=llama_bias, eos_token_id=2)
