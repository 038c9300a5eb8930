"""Incremental detokenisation: the text that each new token of an answer adds."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what `decode` writes for bytes that are not, or not yet, a character
# Longer than any character; bounds the work on an endless run of broken bytes.
MAX_HELD_TOKENS = 64


class Detokenizer:
    """Turns tokens into text one at a time, never half a character.

    The pieces joined are `Tokenizer.decode` of all tokens. Only the number of U+FFFD can differ:
    where a tokenizer writes one for each broken byte, or after more than `MAX_HELD_TOKENS` broken
    bytes in a row. Special tokens are skipped, but for those that are kept.

    Args:
        keep: texts of special tokens that the text shall contain; True: all.
    """

    def __init__(self, tokenizer: Tokenizer, keep: bool | Sequence[str] = False) -> None:
        self._tokenizer, self._joins_bytes = tokenizer, tokenizer.joins_bytes
        self._special_texts, self._keep = tokenizer.special_token_texts, keep
        # The tokens emitted last (the prefix), then those held back. The prefix is decoded again
        # with each new token, because decoders treat the start of a text specially.
        self._window: list[int] = []
        self._prefix_len = 0  # tokens
        self._prefix_text = ""
        self._held_text = ""  # of the tokens held back; may still change

    def step(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        special_text = self._special_texts.get(token_id)
        if special_text is not None:
            return self._flush() + special_text if self._keeps(special_text) else ""
        if self._joins_bytes and not self._held_text:
            text = self._tokenizer.decode_token(token_id)
            if text and REPLACEMENT not in text:  # whole characters: the same behind any token
                self._window, self._prefix_len = [token_id], 1
                self._prefix_text = text
                return text
        self._window.append(token_id)
        new = self._tokenizer.decode(self._window)[len(self._prefix_text) :]
        num_held = len(self._window) - self._prefix_len
        if (not new or new.endswith(REPLACEMENT)) and num_held < MAX_HELD_TOKENS:
            self._held_text = new
            return ""
        self._held_text = new
        return self._flush()

    def _keeps(self, special_text: str) -> bool:
        return self._keep if isinstance(self._keep, bool) else special_text in self._keep

    def _flush(self) -> str:
        """The text held back, as it is; its tokens become the prefix."""
        held, self._held_text = self._held_text, ""
        if len(self._window) > self._prefix_len:
            self._window = self._window[self._prefix_len :]
            self._prefix_len = len(self._window)
            window, tokenizer = self._window, self._tokenizer
            is_single = len(window) == 1
            self._prefix_text = (
                tokenizer.decode_token(window[0]) if is_single else tokenizer.decode(window)
            )
        return held

    def finish(self) -> str:
        """The text held back, a character that stays incomplete; forget all tokens."""
        held, self._held_text = self._held_text, ""
        self._window, self._prefix_len, self._prefix_text = [], 0, ""
        return held
