"""Incremental detokenisation: the text of a growing sequence of tokens."""

from __future__ import annotations

from ramify.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are not, or not yet, a character
MAX_HELD_TOKENS = 64  # longer than any character; bounds the work on endless broken bytes


class Detokenizer:
    """The text of a growing sequence, piece by piece, never half a character.

    The pieces together are what `Tokenizer.decode` makes of all tokens. (Where a tokenizer shows
    each broken byte by itself, or after more than `MAX_HELD_TOKENS` broken bytes in a row, the
    number of U+FFFD signs can differ.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window: list[int] = []  # the tokens told last, then those not told yet
        self._prefix_len = 0
        self._prefix_text = ""  # text of the former: decoders treat the start of a text specially
        self._held_text = ""  # text of the latter, when it may still change

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        new = self._decode()[len(self._prefix_text) :]
        num_held = len(self._window) - self._prefix_len
        if (not new or new.endswith(REPLACEMENT)) and num_held < MAX_HELD_TOKENS:
            self._held_text = new
            return ""
        self._held_text = ""
        self._window = self._window[self._prefix_len :]
        self._prefix_len = len(self._window)
        self._prefix_text = self._decode()
        return new

    def finish(self) -> str:
        """What was held back: a character that stays incomplete."""
        held, self._held_text = self._held_text, ""
        self._window, self._prefix_len, self._prefix_text = [], 0, ""
        return held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip)
