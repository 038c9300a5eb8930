"""A text that begins like an earlier one is tokenised from where they part."""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ramify.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 4_000_000  # of all texts that are remembered: 32 MB


@dataclass(frozen=True, slots=True)
class Encoding:
    """Tokens of a text, and where in it each of them ends, in characters."""

    ids: array[int]
    end_offsets: array[int]


class IncrementalEncoder:
    """Tokenises texts without special tokens of its own; remembers them up to their last turns.

    Special tokens in a text are borders: what stands before one is tokenised by itself. So a text
    may be cut in front of any of them, and the ids of the front are those of an earlier text. That
    is tried once on the tokenizer at hand; where it does not hold, everything is tokenised anew.

    Args:
        max_tokens: remembered in all; the texts that were used longest ago give way.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_tokens: int = MAX_TOKENS) -> None:
        self.tokenizer, self.max_tokens = tokenizer, max_tokens
        self.num_encoded = 0  # characters that were tokenised
        self._known: OrderedDict[tuple[str, str], Encoding] = OrderedDict()  # by owner and text
        self._lengths: Counter[tuple[str, int]] = Counter()  # of those texts
        self._num_tokens = 0
        borders = tokenizer.boundary_tokens
        self._boundary = re.compile("|".join(map(re.escape, borders))) if borders else None
        if self._boundary is not None and not self._cuts_change_nothing(borders):
            self._boundary = None

    def encode(self, text: str, tenant: str = "") -> Encoding:
        """The tokens of a text: those of `Tokenizer.encode(text, add_special_tokens=False)`.

        Only texts of the same owner make it faster: the time that it takes tells others nothing.
        """
        if self._boundary is None:
            return self._fresh(text)
        cuts = [found.start() for found in self._boundary.finditer(text) if found.start()]
        front, at = Encoding(array("i"), array("i")), 0
        for cut in reversed(cuts):
            if not self._lengths[tenant, cut]:  # a look at each front would be quadratic
                continue
            known = self._known.get((tenant, text[:cut]))
            if known is not None:
                self._known.move_to_end((tenant, text[:cut]))
                front, at = known, cut
                break
        ids, ends = front.ids[:], front.end_offsets[:]
        newest = cuts[-1] if cuts and cuts[-1] > at else None
        for begin, end in ((at, newest or at), (newest or at, len(text))):
            if begin < end:
                piece = self._fresh(text[begin:end])
                ids.extend(piece.ids)
                ends.extend(array("i", (begin + place for place in piece.end_offsets)))
            if end == newest:
                self._remember(tenant, text[:newest], Encoding(ids[:], ends[:]))
        return Encoding(ids, ends)

    def _fresh(self, text: str) -> Encoding:
        self.num_encoded += len(text)
        ids, ends = self.tokenizer.encode_with_offsets(text)
        return Encoding(ids, ends)

    def _remember(self, tenant: str, text: str, encoded: Encoding) -> None:
        self._known[tenant, text] = encoded
        self._lengths[tenant, len(text)] += 1
        self._num_tokens += len(encoded.ids)
        while self._num_tokens > self.max_tokens and self._known:
            (of, gone), old = self._known.popitem(last=False)
            self._lengths[of, len(gone)] -= 1
            if not self._lengths[of, len(gone)]:
                del self._lengths[of, len(gone)]
            self._num_tokens -= len(old.ids)

    def _cuts_change_nothing(self, boundaries: Sequence[str]) -> bool:
        encode = self.tokenizer.encode_with_offsets
        for border in boundaries:
            for before in ("Well", "a b ", "\n", " x\n\n"):
                for after in ("the end", " the", "\nno", ""):
                    whole, _ = encode(before + border + after)
                    if whole != encode(before)[0] + encode(border + after)[0]:
                        return False
        return True
