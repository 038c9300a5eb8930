"""Escaping of special tokens in user text: only a chat template may write real ones."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import tokenizers

from ramify.errors import PromptTooLongError

# A noncharacter, which no text contains: breaks up the special tokens that users write.
ESCAPE_CHAR = "\U0010fffe"


class SpecialTokenEscaper:
    """Escapes special tokens in user text, and encodes text that contains such escapes.

    A special token `<s>` that a user writes becomes `<·s·>·` (· is `ESCAPE_CHAR`). To encode, each
    unescaped special token, which the template wrote, is replaced by an alias `··<s>` that only a
    copy of the tokenizer has as an added token; that copy reads all other text as plain text. An
    alias takes in the same space as its token (`lstrip`, `rstrip`), but ignores `single_word` and
    `normalized`.

    Two kinds of user text still become special tokens, where the vocabulary has the token's text as
    a piece (Unigram models, as a rule): text that only the normalizer turns into it ("＜/s＞"), and
    a token of a single character, which cannot be broken up.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._special = {
            token_id: token for token_id, token in added.items() if token.special and token.content
        }
        texts = sorted((token.content for token in self._special.values()), key=len, reverse=True)
        pattern = "|".join(map(re.escape, texts))
        self._unescaped = re.compile(f"(?:{pattern})(?!{ESCAPE_CHAR})") if pattern else None
        self._alias_tokenizer: tokenizers.Tokenizer | None = None  # made at first use
        self._id_of_alias: dict[int, int] = {}  # id of an alias → id of its token
        self._escape_id = 0  # id of `ESCAPE_CHAR` in the copy; encodes nothing

    def escape_special_tokens(self, value: Any) -> Any:
        """Insert `ESCAPE_CHAR` after each character of special tokens, in nested values too.

        After each character, because special tokens may overlap or contain one another.
        """
        if isinstance(value, str):
            if self._unescaped is None:
                return value
            text = value.replace(ESCAPE_CHAR, "")
            return self._unescaped.sub(lambda match: ESCAPE_CHAR.join((*match[0], "")), text)
        if isinstance(value, Mapping):
            return {
                self.escape_special_tokens(name)
                if isinstance(name, str)
                else name: self.escape_special_tokens(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_special_tokens(item) for item in value]
        return value

    def encode(
        self, text: str, max_tokens: int | None = None
    ) -> tuple[array[int], array[int]] | None:
        """Token ids [T] and end offsets [T] of a text with escapes; None if it has none.

        Offsets count the escape characters.

        Raises:
            PromptTooLongError: it has more than `max_tokens`.
        """
        if ESCAPE_CHAR not in text or self._unescaped is None:
            return None
        # The template's special tokens; segment i is the text before the i-th of them.
        spans = [match.span() for match in self._unescaped.finditer(text)]
        ids, begins, ends = self._encode(text, spans, (), max_tokens)
        starts, position, segments = [start for start, _ in spans], 0, list[str]()
        for start, end in (*spans, (len(text), len(text))):
            segments.append(text[position:start].replace(ESCAPE_CHAR, ""))
            position = end
        # Segments in which the vocabulary itself has read a special token: with certainty, where
        # escapes lie inside the token; else (it may be the unknown token) if its text is there.
        misread = set[int]()
        candidates = set[tuple[int, int]]()
        for token, begin, end in zip(ids, begins, ends, strict=True):
            if token in self._special:
                segment = bisect_right(starts, end - 1)
                candidates.add((segment, token))
                if ESCAPE_CHAR in text[begin:end].lstrip(ESCAPE_CHAR):
                    misread.add(segment)
        misread |= {
            segment
            for segment, token in candidates
            if self._special[token].content in segments[segment]
        }
        if misread:
            ids, _, ends = self._encode(text, spans, misread, max_tokens)
        return array("i", (self._id_of_alias.get(token, token) for token in ids)), ends

    def _encode(
        self,
        text: str,
        spans: list[tuple[int, int]],
        broken_up: Collection[int],
        max_tokens: int | None,
    ) -> tuple[list[int], list[int], array[int]]:
        """Ids, aliases not yet resolved, and the offsets at which each begins and ends.

        Escapes split tokens only in the segments `broken_up`. Elsewhere they are removed, so that a
        text has the ids that it has without them.
        """
        tokenizer = self._alias_tokenizer or self._with_aliases()
        is_kept = np.frombuffer(text.encode("utf-32-le"), np.uint32) != ord(ESCAPE_CHAR)
        # offsets[i]: where in `text` the i-th character of the encoded text begins
        pieces, offsets, position = list[str](), [np.zeros(1, np.int64)], 0
        for segment, (start, end) in enumerate((*spans, (len(text), len(text)))):
            if segment in broken_up:
                pieces.append(text[position:start])
                offsets.append(np.arange(position + 1, start + 1))
            else:
                pieces.append(text[position:start].replace(ESCAPE_CHAR, ""))
                offsets.append(np.flatnonzero(is_kept[position:start]) + position + 1)
            if start < end:
                pieces.append(_alias(text[start:end]))
                offsets.append(np.full(len(pieces[-1]), end))
            position = end
        encoding = tokenizer.encode("".join(pieces), add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise PromptTooLongError(len(encoding), max_tokens)
        ids = np.array(encoding.ids, np.int64)
        token_spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        is_text = ids != self._escape_id
        begins, ends = np.concatenate(offsets)[token_spans[is_text]].T
        return (
            ids[is_text].tolist(),
            begins.tolist(),
            array("i", ends.astype(np.int32).tobytes()),
        )

    def _with_aliases(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text, and has their aliases as added tokens."""
        tokenizer = tokenizers.Tokenizer.from_str(self._core.to_str())
        tokenizer.encode_special_tokens = True
        aliases = {
            _alias(token.content): (token_id, token) for token_id, token in self._special.items()
        }
        tokenizer.add_tokens(
            [
                tokenizers.AddedToken(
                    text, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                for text, (_, token) in aliases.items()
            ]
        )
        self._id_of_alias = {
            _id(tokenizer, text): token_id for text, (token_id, _) in aliases.items()
        }
        tokenizer.add_tokens([tokenizers.AddedToken(ESCAPE_CHAR, normalized=False)])
        self._escape_id = _id(tokenizer, ESCAPE_CHAR)
        self._alias_tokenizer = tokenizer
        return tokenizer


def _alias(text: str) -> str:
    return ESCAPE_CHAR + ESCAPE_CHAR + text


def _id(core: tokenizers.Tokenizer, text: str) -> int:
    token_id = core.token_to_id(text)
    assert token_id is not None
    return token_id
