"""Incremental tokenisation: a text that begins like an earlier one is encoded from there on."""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ramify.engine.text.tenant_lru import TenantLru
from ramify.engine.text.tokenizer import Tokenizer

MAX_TOKENS = 4_000_000  # of all remembered texts: 32 MB
MAX_BOUNDARIES = 2000  # each is tried on the tokenizer, for 2 ms
ENTRY_TOKENS = 32  # memory of an entry besides its tokens, in tokens


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
        max_tokens: remembered in all, and half as many of one tenant; the least recently used
            texts of the tenant with most are dropped.
        max_text_tokens: PromptTooLongError for a text with more; None: no limit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int = MAX_TOKENS,
        max_text_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.max_text_tokens = tokenizer, max_text_tokens
        self.num_encoded = 0  # characters that were tokenised
        # By length in characters and digest of the text.
        self._remembered: TenantLru[tuple[int, bytes], Encoding] = TenantLru(
            max_cost=max_tokens, max_tenant_cost=max_tokens // 2
        )
        self._lock = threading.Lock()  # of the two below: several threads encode
        self._lengths: Counter[tuple[str, int]] = Counter()  # (tenant, characters) of those texts
        # Any of them may be left out: others are cut at.
        boundaries = tokenizer.boundary_tokens[:MAX_BOUNDARIES]
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
        front_len, front = self._longest_remembered(text, cuts, tenant)
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

    def _longest_remembered(
        self, text: str, cuts: Sequence[int], tenant: str
    ) -> tuple[int, Encoding]:
        """The longest front of a text that is remembered: its characters, and its tokens."""
        # Comparing every front would be quadratic.
        with self._lock:
            known = [cut for cut in cuts if self._lengths[tenant, cut]]
        for cut in reversed(known):
            key = _text_key(text[:cut])
            with self._lock:
                remembered = self._remembered.get(tenant, key)
                if remembered is not None:
                    self._remembered.touch(tenant, key)
                    return cut, remembered
        return 0, Encoding(array("i"), array("i"))

    def _encode_whole(self, text: str) -> Encoding:
        self.num_encoded += len(text)
        ids, ends = self.tokenizer.encode_with_offsets(text, self.max_text_tokens)
        return Encoding(ids, ends)

    def _remember(self, tenant: str, text: str, encoding: Encoding) -> None:
        key, cost = _text_key(text), len(encoding.ids) + ENTRY_TOKENS
        with self._lock:
            self._lengths[tenant, len(text)] += 1
            for dropped in self._remembered.put(tenant, key, encoding, cost):
                length = dropped.tenant, dropped.key[0]
                self._lengths[length] -= 1
                if not self._lengths[length]:
                    del self._lengths[length]

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


def _text_key(text: str) -> tuple[int, bytes]:
    """Length and digest of a text, which need less memory than the text."""
    return len(text), hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
