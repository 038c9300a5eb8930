"""Incremental tokenisation: a text that begins like an earlier one is encoded from there on."""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ramify.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 4_000_000  # of all remembered texts: 32 MB


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids [T] of a text, and the character at which each token ends [T]."""

    ids: array[int]
    end_offsets: array[int]


class IncrementalEncoder:
    """Encodes texts without adding special tokens, and remembers each up to its last special token.

    Special tokens in a text are boundaries: what stands before one is tokenised by itself. So a
    text may be cut in front of any of them, and a front that is remembered need not be encoded
    again. `__init__` tries that on the tokenizer; where a cut changes ids, every text is encoded
    whole.

    Args:
        max_tokens: remembered in all; the least recently used texts are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int = MAX_TOKENS) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.num_encoded = 0  # characters that were tokenised
        self._remembered: OrderedDict[tuple[str, str], Encoding] = OrderedDict()  # (tenant, text) →
        self._lengths: Counter[tuple[str, int]] = Counter()  # (tenant, characters) of those texts
        self._num_tokens = 0
        boundaries = tokenizer.boundary_tokens
        self._boundary = re.compile("|".join(map(re.escape, boundaries))) if boundaries else None
        if self._boundary is not None and not self._cuts_change_nothing(boundaries):
            self._boundary = None

    def encode(self, text: str, tenant: str = "") -> Encoding:
        """The tokens of `Tokenizer.encode(text, add_special_tokens=False)`, with end offsets.

        Only texts of the same tenant are reused: the time taken tells other tenants nothing.
        """
        if self._boundary is None:
            return self._encode_whole(text)
        cuts = [match.start() for match in self._boundary.finditer(text) if match.start()]
        front, front_len = Encoding(array("i"), array("i")), 0
        for cut in reversed(cuts):
            if not self._lengths[tenant, cut]:  # comparing every front would be quadratic
                continue
            remembered = self._remembered.get((tenant, text[:cut]))
            if remembered is not None:
                self._remembered.move_to_end((tenant, text[:cut]))
                front, front_len = remembered, cut
                break
        ids, ends = front.ids[:], front.end_offsets[:]
        newest = cuts[-1] if cuts and cuts[-1] > front_len else None
        for begin, end in ((front_len, newest or front_len), (newest or front_len, len(text))):
            if begin < end:
                piece = self._encode_whole(text[begin:end])
                ids.extend(piece.ids)
                ends.extend(array("i", (begin + offset for offset in piece.end_offsets)))
            if end == newest:
                self._remember(tenant, text[:newest], Encoding(ids[:], ends[:]))
        return Encoding(ids, ends)

    def _encode_whole(self, text: str) -> Encoding:
        self.num_encoded += len(text)
        ids, ends = self.tokenizer.encode_with_offsets(text)
        return Encoding(ids, ends)

    def _remember(self, tenant: str, text: str, encoding: Encoding) -> None:
        self._remembered[tenant, text] = encoding
        self._lengths[tenant, len(text)] += 1
        self._num_tokens += len(encoding.ids)
        while self._num_tokens > self.max_tokens and self._remembered:
            (old_tenant, old_text), old = self._remembered.popitem(last=False)
            self._lengths[old_tenant, len(old_text)] -= 1
            if not self._lengths[old_tenant, len(old_text)]:
                del self._lengths[old_tenant, len(old_text)]
            self._num_tokens -= len(old.ids)

    def _cuts_change_nothing(self, boundaries: Sequence[str]) -> bool:
        """Whether texts cut in front of each boundary have the ids that they have uncut."""
        encode = self.tokenizer.encode_with_offsets
        for boundary in boundaries:
            for before in ("Well", "a b ", "\n", " x\n\n"):
                for after in ("the end", " the", "\nno", ""):
                    whole, _ = encode(before + boundary + after)
                    if whole != encode(before)[0] + encode(boundary + after)[0]:
                        return False
        return True
