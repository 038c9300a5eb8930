"""The longest prefix that a prompt shares with earlier prompts, at a step of tokens.

Prefixes are known by their hashes, which a `PrefixTable` holds with the times of their entries. Hashes at
a coarse stride find the stride in which prompts part; hashes at each step are stored only there. A prompt
of n tokens costs n / stride entries and up to two strides of steps, so that page size 1 needs no entry
for each token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.providers.prompts import Timing
from ramify.analysis.tokens import Tokens

Slots = NDArray[np.int64]
Flags = NDArray[np.bool_]

MIN_STEP = 16  # tokens; smaller steps have coarse hashes
STRIDE = 32  # of the coarse hashes, tokens
_FINE = np.uint64(0xD6E8FEB86659FD93)  # fine hashes are other keys than the coarse of equal length
_MAX_RECENT = 4
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIN_BITS = 10


class PrefixTable:
    """A hash table of prefixes with the times of their entries; calls take whole arrays.

    Open addressing with linear probing, at most half full; 32 bytes for each slot. The columns are
    indexed by slot; a slot is valid until the next `insert` or `touch`. `owner` is the first prompt with
    the prefix, `writer` the prompt whose entry it is since it last expired.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s, self._num_keys = lifetime_s, 0
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

    def is_ready(self, slots: Slots, timing: Timing) -> Flags:
        """[slots] whether each entry's writer has begun to answer at a look-up."""
        if timing.lookup_s is None:
            return np.ones(len(slots), np.bool_)
        return self.ready_s[slots] <= timing.lookup_s

    def is_kept(self, slots: Slots, timing: Timing) -> Flags:
        """[slots] whether each entry has not expired at a look-up."""
        if timing.lookup_s is None:
            return np.ones(len(slots), np.bool_)
        return timing.lookup_s < self.used_s[slots] + self._lifetime_s

    def touch(self, keys: Tokens, slots: Slots, timing: Timing, number: int) -> None:
        """Refresh the entries that are stored, write those that are not or have expired.

        Args:
            keys: of the prefixes.
            slots: of the keys, as `find` gave them.
            timing: of the prompt that uses and writes them.
            number: of that prompt.
        """
        is_new = slots < 0
        old = slots[~is_new]
        if len(old):
            dead = old[~self.is_kept(old, timing)]
            self.ready_s[dead], self.used_s[dead] = timing.ready_s, timing.written_s
            self.writer[dead] = number
            self.ready_s[old] = np.minimum(self.ready_s[old], timing.ready_s)
            self.used_s[old] = np.maximum(self.used_s[old], timing.used_s)
        if is_new.any():
            new = self.insert(keys[is_new])
            self.ready_s[new], self.used_s[new] = timing.ready_s, timing.written_s
            self.owner[new] = self.writer[new] = number

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


class Depth(NamedTuple):
    """A stored prefix: its tokens, and the number of the prompt that wrote it; (0, -1): none."""

    num_tokens: int = 0
    writer: int = -1


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens of the longest prefix that is stored, by what is required of it."""

    read: int
    if_ready: int
    if_kept: int
    writer: int | None  # number of the prompt that stored the deepest step read
    in_flight: int | None
    expired: int | None

    @classmethod
    def of(cls, read: Depth, if_ready: Depth, if_kept: Depth) -> Shared:
        """From the deepest prefix that can be read, that has not expired, and that is ready."""
        return cls(
            read.num_tokens,
            if_ready.num_tokens,
            if_kept.num_tokens,
            writer=read.writer if read.num_tokens else None,
            in_flight=if_ready.writer if if_ready.num_tokens > read.num_tokens else None,
            expired=if_kept.writer if if_kept.num_tokens > read.num_tokens else None,
        )


class PrefixIndex:
    """Prefixes of all prompts so far.

    Args:
        step: tokens; shared lengths are multiples.
        lifetime_s: seconds after the last use; infinite: until the end.
        hashes_of: [n + 1] hashes of all prefixes of an earlier prompt, and its times, by number;
            needed if the stride is greater than the step.
        stride: of the coarse hashes, a multiple of the step; by default the step from 16 tokens on,
            else 32 tokens.
    """

    def __init__(
        self,
        step: int,
        lifetime_s: float,
        hashes_of: Callable[[int], tuple[Tokens, Timing]] | None = None,
        *,
        stride: int | None = None,
    ) -> None:
        self._step, self._hashes_of = step, hashes_of
        self._stride = stride or (step if step >= MIN_STEP else STRIDE // step * step)
        self._coarse, self._fine = PrefixTable(lifetime_s), PrefixTable(lifetime_s)
        self._first: dict[int, int] = {}  # hash of an empty prefix: the first prompt that has it
        self._expanded: set[int] = set()  # coarse prefixes whose continuations are stored by step
        self._recent: OrderedDict[int, tuple[Tokens, Timing]] = OrderedDict()

    def share(
        self, number: int, hashes: Tokens, timing: Timing, *, will_go_on: bool = False
    ) -> Shared:
        """Look a prompt's prefixes up, then store and refresh all.

        Args:
            number: of the prompt.
            hashes: [n + 1] of all its prefixes.
            timing: of its look-up and its entries.
            will_go_on: the same number is shared again with an answer behind the prompt, which is
                ready at another time.
        """
        self._recent[number] = hashes, timing
        while len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
        stride = self._stride
        keys = hashes[stride::stride]
        slots = self._coarse.find(keys)
        deepest = _deepest(self._coarse, slots, timing, 0, stride)
        if stride > self._step:
            for finer in self._share_fine(number, hashes, timing, slots):
                deepest = tuple(map(max, deepest, finer))
        self._coarse.touch(keys, slots, timing, number)
        if will_go_on and stride > self._step:
            self._expand_end(number, hashes, timing)
        return Shared.of(*deepest)

    def _share_fine(
        self, number: int, hashes: Tokens, timing: Timing, slots: Slots
    ) -> Iterator[tuple[Depth, ...]]:
        """Look up and store steps after each coarse prefix that has several continuations."""
        stride = self._stride
        num_stored = _leading(slots >= 0)
        root = int(hashes[0])
        first = self._first.setdefault(root, number)
        coarse = hashes[: num_stored * stride + 1 : stride].tolist()
        for at, key in enumerate(coarse):
            start = at * stride
            end = min(start + stride, len(hashes))  # a whole stride is a coarse prefix itself
            if key not in self._expanded:
                if at < num_stored or end - start <= self._step:
                    continue
                owner = first if at == 0 else int(self._coarse.owner[slots[at - 1]])
                if owner == number:
                    continue
                self._expand(key, owner, start)
            fine = hashes[start + self._step : end : self._step] * _FINE
            fine_slots = self._fine.find(fine)
            yield _deepest(self._fine, fine_slots, timing, start, self._step)
            self._fine.touch(fine, fine_slots, timing, number)

    def _expand_end(self, number: int, hashes: Tokens, timing: Timing) -> None:
        """Store the steps after the last coarse prefix, so that an answer's steps are apart."""
        at = (len(hashes) - 1) // self._stride
        start = at * self._stride
        key = int(hashes[start])
        if key in self._expanded:
            return
        owner = (
            self._first[key]
            if at == 0
            else int(self._coarse.owner[self._coarse.find(hashes[start : start + 1])[0]])
        )
        if owner != number:
            self._expand(key, owner, start)
        self._expanded.add(key)
        fine = hashes[start + self._step :: self._step] * _FINE
        self._fine.touch(fine, self._fine.find(fine), timing, number)

    def _expand(self, key: int, owner: int, start: int) -> None:
        """Store the steps of the only continuation of a coarse prefix so far."""
        self._expanded.add(key)
        recent = self._recent.get(owner)
        if recent is None:
            assert self._hashes_of is not None
            recent = self._hashes_of(owner)
        hashes, timing = recent
        stop = start + self._stride
        fine = hashes[start + self._step : min(stop, len(hashes)) : self._step] * _FINE
        slots = self._fine.find(fine)
        slots[slots < 0] = self._fine.insert(fine[slots < 0])
        self._fine.owner[slots] = self._fine.writer[slots] = owner
        if stop < len(hashes):
            # All prompts that went on did so to this next coarse prefix: its times are theirs.
            (after,) = self._coarse.find(hashes[stop : stop + 1]).tolist()
            self._fine.ready_s[slots] = self._coarse.ready_s[after]
            self._fine.used_s[slots] = self._coarse.used_s[after]
            self._fine.writer[slots] = self._coarse.writer[after]
        else:
            self._fine.ready_s[slots], self._fine.used_s[slots] = timing.ready_s, timing.written_s


def _deepest(
    table: PrefixTable, slots: Slots, timing: Timing, base: int, step: int
) -> tuple[Depth, ...]:
    """Lengths of leading keys that can be read, that have not expired, and that are ready.

    An ancestor is at least as alive as its child.
    """
    slots = slots[: _leading(slots >= 0)]
    is_ready, is_kept = table.is_ready(slots, timing), table.is_kept(slots, timing)
    counts = _leading(is_ready & is_kept), _leading(is_kept), _leading(is_ready)
    return tuple(
        Depth(base + count * step, int(table.writer[slots[count - 1]])) if count else Depth()
        for count in counts
    )


def _leading(flags: Flags) -> int:
    """Number of true values before the first false."""
    return len(flags) if flags.all() else int(flags.argmin())
