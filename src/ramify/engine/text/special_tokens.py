"""Special tokens that users write are text; those that a template writes are tokens."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers

ESCAPE_CHAR = (
    "\U0010fffe"  # no character, and in no text: breaks up special tokens that users write
)


class SpecialTokenEscaper:
    """Marks special tokens in what users write, and encodes text with such marks.

    Encoding replaces the template's own special tokens by aliases, which only a copy of the
    tokenizer has: that copy reads all others as text. An alias takes the same space with it as its
    token (`lstrip`, `rstrip`); it is one wherever its text stands (no `single_word`), as written.

    Two kinds of text still become special tokens, where the vocabulary has the token's text as a
    piece (Unigram models, as a rule): what only a normalizer makes that text of ("＜/s＞"), and a
    token of a single sign, which cannot be cut.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._special = {index: one for index, one in added.items() if one.special and one.content}
        texts = sorted((one.content for one in self._special.values()), key=len, reverse=True)
        found = "|".join(map(re.escape, texts))
        self._written = re.compile(f"(?:{found})(?!{ESCAPE_CHAR})") if found else None
        self._plain: tokenizers.Tokenizer | None = None  # with aliases; made when it is needed
        self._ids: dict[int, int] = {}  # of an alias → of its token
        self._cut = 0  # the id of an `ESCAPE_CHAR`, which stands for nothing

    def escape_special_tokens(self, value: Any) -> Any:
        """What users wrote, nested as it may be, with an `ESCAPE_CHAR` after each sign of special tokens.

        After each, since special tokens may overlap, or be a part of one another.
        """
        if isinstance(value, str):
            if self._written is None:
                return value
            text = value.replace(ESCAPE_CHAR, "")
            return self._written.sub(lambda found: ESCAPE_CHAR.join((*found[0], "")), text)
        if isinstance(value, Mapping):
            return {
                self.escape_special_tokens(name)
                if isinstance(name, str)
                else name: self.escape_special_tokens(one)
                for name, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_special_tokens(one) for one in value]
        return value

    def encode(self, text: str) -> tuple[array[int], array[int]] | None:
        """Ids of a text with guards, and where each ends, guards counted; None if it has none."""
        if ESCAPE_CHAR not in text or self._written is None:
            return None
        borders = [found.span() for found in self._written.finditer(text)]
        ids, begins, ends = self._encode(text, borders, ())
        starts, at, written = [start for start, _ in borders], 0, list[str]()
        for start, end in (*borders, (len(text), len(text))):
            written.append(text[at:start].replace(ESCAPE_CHAR, ""))
            at = end
        as_token = set[int]()  # stretches whose text the vocabulary takes for a special token
        maybe = set[tuple[int, int]]()  # what is unknown is often one that nobody has written
        for one, begin, end in zip(ids, begins, ends, strict=True):
            if one in self._special:
                number = bisect_right(starts, end - 1)
                maybe.add((number, one))
                if ESCAPE_CHAR in text[begin:end].lstrip(ESCAPE_CHAR):
                    as_token.add(number)
        as_token |= {at for at, one in maybe if self._special[one].content in written[at]}
        if as_token:  # but it has not the token's characters for that
            ids, _, ends = self._encode(text, borders, as_token)
        return array("i", (self._ids.get(one, one) for one in ids)), ends

    def _encode(
        self, text: str, borders: list[tuple[int, int]], cut: Collection[int]
    ) -> tuple[list[int], list[int], array[int]]:
        """Ids, still those of aliases, and where each begins and ends.

        The stretches between borders that `cut` names are cut at every guard; elsewhere the guards
        are taken out, so that a text has the ids that it has without them.
        """
        plain = self._plain or self._with_aliases()
        pieces, places, at = list[str](), [0], 0  # places: of each border between characters
        for number, (start, end) in enumerate((*borders, (len(text), len(text)))):
            for place in range(at, start):
                if text[place] != ESCAPE_CHAR or number in cut:
                    pieces.append(text[place])
                    places.append(place + 1)
            if start < end:
                pieces.append(_alias(text[start:end]))
                places.extend([end] * len(pieces[-1]))
            at = end
        found = plain.encode("".join(pieces), add_special_tokens=False)
        ids, offsets = found.ids, found.offsets  # each of which is a new list
        kept = [at for at, one in enumerate(ids) if one != self._cut]
        begins = [places[offsets[at][0]] for at in kept]
        ends = array("i", (places[offsets[at][1]] for at in kept))
        return [ids[at] for at in kept], begins, ends

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
        plain.add_tokens([tokenizers.AddedToken(ESCAPE_CHAR, normalized=False)])
        self._cut = _id(plain, ESCAPE_CHAR)
        self._plain = plain
        return plain


def _alias(text: str) -> str:
    return ESCAPE_CHAR + ESCAPE_CHAR + text


def _id(core: tokenizers.Tokenizer, text: str) -> int:
    index = core.token_to_id(text)
    assert index is not None
    return index
