"""A hash table of prefixes whose look-ups and insertions take whole arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.tokens import Tokens

Slots = NDArray[np.int64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIN_BITS = 10


class PrefixTable:
    """Open addressing with linear probing, at most half full; 32 bytes for each slot.

    The columns are indexed by slot; a slot is valid until the next `insert`. `owner` is the first prompt
    with the prefix, `writer` the prompt whose entry it is since it last expired.
    """

    def __init__(self) -> None:
        self._num_keys = 0
        self._allocate(_MIN_BITS)

    def _allocate(self, bits: int) -> None:
        size = 1 << bits
        self._shift, self._mask = np.uint64(64 - bits), size - 1
        self._keys = np.zeros(size, np.uint64)  # 0: the slot is free
        self.ready_s = np.zeros(size)
        self.used_s = np.zeros(size)
        self.owner = np.zeros(size, np.int32)
        self.writer = np.zeros(size, np.int32)

    def find(self, keys: Tokens) -> Slots:
        """[keys] slot of each key, -1 where it is absent."""
        keys = np.maximum(keys, np.uint64(1))
        slots = ((keys * _SPREAD) >> self._shift).astype(np.int64)
        hits = np.full(len(keys), -1, np.int64)
        todo = np.arange(len(keys))
        while len(todo):
            stored = self._keys[slots[todo]]
            is_hit = stored == keys[todo]
            hits[todo[is_hit]] = slots[todo[is_hit]]
            todo = todo[~is_hit & (stored != 0)]
            slots[todo] = (slots[todo] + 1) & self._mask
        return hits

    def insert(self, keys: Tokens) -> Slots:
        """[keys] slots of keys that are absent and different."""
        if 2 * (self._num_keys + len(keys)) > len(self._keys):
            self._grow(self._num_keys + len(keys))
        self._num_keys += len(keys)
        return self._place(np.maximum(keys, np.uint64(1)))

    def _place(self, keys: Tokens) -> Slots:
        slots = ((keys * _SPREAD) >> self._shift).astype(np.int64)
        todo = np.arange(len(keys))
        while len(todo):
            free = todo[self._keys[slots[todo]] == 0]
            # Of several keys for one slot the last write stays; the others go on to the next slot.
            self._keys[slots[free]] = keys[free]
            todo = todo[self._keys[slots[todo]] != keys[todo]]
            slots[todo] = (slots[todo] + 1) & self._mask
        return slots

    def _grow(self, num_keys: int) -> None:
        old = self._keys, self.ready_s, self.used_s, self.owner, self.writer
        is_used = old[0] != 0
        self._allocate((4 * num_keys - 1).bit_length())
        slots = self._place(old[0][is_used])
        self.ready_s[slots] = old[1][is_used]
        self.used_s[slots] = old[2][is_used]
        self.owner[slots] = old[3][is_used]
        self.writer[slots] = old[4][is_used]
