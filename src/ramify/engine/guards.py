"""Special tokens that users write are text; those that a template writes are tokens."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

GUARD = "\U0010fffe"  # no character, and in no text: breaks up special tokens that users write


class Guards:
    """Marks special tokens in what users write, and encodes text with such marks.

    Encoding replaces the template's own special tokens by aliases, which only a copy of the
    tokenizer has: that copy reads all others as text. Everything else about a token, such as the
    space that it takes with it, is the same.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._special = {index: one for index, one in added.items() if one.special and one.content}
        texts = sorted((one.content for one in self._special.values()), key=len, reverse=True)
        found = "|".join(map(re.escape, texts))
        self._written = re.compile(f"(?:{found})(?!{GUARD})") if found else None
        self._plain: tokenizers.Tokenizer | None = None  # with aliases; made when it is needed
        self._ids: dict[int, int] = {}  # of an alias → of its token
        self._cut = 0  # the id of a `GUARD`, which stands for nothing

    def guarded(self, value: Any) -> Any:
        """What users wrote, nested as it may be, with a `GUARD` in every special token."""
        if isinstance(value, str):
            if self._written is None:
                return value
            text = value.replace(GUARD, "")
            return self._written.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
        if isinstance(value, Mapping):
            return {
                self.guarded(name) if isinstance(name, str) else name: self.guarded(one)
                for name, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.guarded(one) for one in value]
        return value

    def encode(self, text: str) -> tuple[array[int], array[int]] | None:
        """Ids of a text with guards, and where each ends, guards counted; None if it has none."""
        if GUARD not in text or self._written is None:
            return None
        borders = [found.span() for found in self._written.finditer(text)]
        ids, ends = self._encode(text, borders, ())
        starts = [start for start, _ in borders]
        as_token = {  # the vocabulary has the text of a special token, but not of its halves
            bisect_right(starts, end - 1)
            for one, begin, end in zip(ids, (0, *ends), ends, strict=False)
            if one in self._special and GUARD in text[begin:end].lstrip(GUARD)
        }
        if as_token:
            ids, ends = self._encode(text, borders, as_token)
        return array("i", (self._ids.get(one, one) for one in ids)), ends

    def _encode(
        self, text: str, borders: list[tuple[int, int]], cut: Collection[int]
    ) -> tuple[list[int], array[int]]:
        """Ids, still those of aliases; the stretches between borders that `cut` names are cut.

        Elsewhere the guards are taken out, so that a text has the ids that it has without them.
        """
        plain = self._plain or self._with_aliases()
        pieces, places, at = list[str](), [0], 0  # places: of each border between characters
        for number, (start, end) in enumerate((*borders, (len(text), len(text)))):
            for place in range(at, start):
                if text[place] != GUARD or number in cut:
                    pieces.append(text[place])
                    places.append(place + 1)
            if start < end:
                pieces.append(_alias(text[start:end]))
                places.extend([end] * len(pieces[-1]))
            at = end
        found = plain.encode("".join(pieces), add_special_tokens=False)
        kept = [at for at, one in enumerate(found.ids) if one != self._cut]
        ids, offsets = found.ids, found.offsets
        return [ids[at] for at in kept], array("i", (places[offsets[at][1]] for at in kept))

    def _with_aliases(self) -> tokenizers.Tokenizer:
        """A copy that reads special tokens as text, and has a token in place of each."""
        plain = tokenizers.Tokenizer.from_str(self._core.to_str())
        plain.encode_special_tokens = True
        aliases = {_alias(one.content): (index, one) for index, one in self._special.items()}
        plain.add_tokens(
            [
                tokenizers.AddedToken(text, lstrip=one.lstrip, rstrip=one.rstrip, normalized=False)
                for text, (_, one) in aliases.items()
            ]
        )
        self._ids = {_id(plain, text): index for text, (index, _) in aliases.items()}
        plain.add_tokens([tokenizers.AddedToken(GUARD, normalized=False)])
        self._cut = _id(plain, GUARD)
        self._plain = plain
        return plain


def _alias(text: str) -> str:
    return GUARD + GUARD + text


def _id(core: tokenizers.Tokenizer, text: str) -> int:
    index = core.token_to_id(text)
    assert index is not None
    return index
