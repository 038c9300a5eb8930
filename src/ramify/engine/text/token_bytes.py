"""Bytes of single tokens: a token that is part of a character has bytes, but no text."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from ramify.engine.text.ranked_bpe import byte_letters

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTES = {letter: byte for byte, letter in byte_letters().items()}


class TokenBytes:
    """The bytes that the tokens of a vocabulary stand for, where they differ from its texts."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        self._added = frozenset(core.get_added_tokens_decoder())
        kinds = decoder_kinds(core)
        self._is_byte_level, self._has_byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds

    def of(self, token: int) -> bytes | None:
        """The bytes of a token; None for one whose text has them."""
        piece = self._core.id_to_token(token)
        if piece is None or token in self._added:
            return None
        if self._is_byte_level:
            if not all(character in BYTES for character in piece):
                return None
            return bytes(BYTES[character] for character in piece)
        match = BYTE_TOKEN.fullmatch(piece) if self._has_byte_tokens else None
        return None if match is None else bytes([int(match[1], 16)])


def decoder_kinds(core: tokenizers.Tokenizer) -> frozenset[str]:
    """The types of a tokenizer's decoder and of those it is made of."""
    if core.decoder is None:
        return frozenset()
    state: Any = json.loads(core.decoder.__getstate__())
    parts = [state, *state.get("decoders", ())]
    return frozenset(part["type"] for part in parts)
