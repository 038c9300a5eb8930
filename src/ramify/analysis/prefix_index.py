"""The longest prefix that a prompt shares with earlier prompts, at a step of tokens.

Hashes of prefixes at a coarse stride find the stride in which prompts part; hashes at each step are
stored only there. A prompt of n tokens costs n / stride entries and up to two strides of steps, so
that page size 1 needs no entry for each token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.prefix_table import PrefixTable, Slots
from ramify.analysis.providers.prompts import Timing
from ramify.analysis.tokens import Tokens

MIN_STEP = 16  # tokens; smaller steps have coarse hashes
STRIDE = 32  # of the coarse hashes, tokens
_FINE = np.uint64(0xD6E8FEB86659FD93)  # fine hashes are other keys than the coarse of equal length
_MAX_RECENT = 4


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens of the longest prefix that is stored, by what is required of it."""

    read: int
    if_ready: int
    if_kept: int
    writer: int | None  # number of the prompt that stored the deepest step read
    in_flight: int | None
    expired: int | None


@dataclass(slots=True)
class _Lengths:
    """Deepest stored lengths so far, with the writer of each."""

    read: tuple[int, int] = (0, -1)
    if_ready: tuple[int, int] = (0, -1)
    if_kept: tuple[int, int] = (0, -1)

    def add(self, other: _Lengths) -> None:
        self.read = max(self.read, other.read)
        self.if_ready = max(self.if_ready, other.if_ready)
        self.if_kept = max(self.if_kept, other.if_kept)


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
        self._step, self._lifetime_s, self._hashes_of = step, lifetime_s, hashes_of
        self._stride = stride or (step if step >= MIN_STEP else STRIDE // step * step)
        self._coarse, self._fine = PrefixTable(), PrefixTable()
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
        lengths = self._lengths(self._coarse, slots, timing, 0, stride)
        if stride > self._step:
            self._share_fine(number, hashes, timing, slots, lengths)
        self._touch(self._coarse, keys, slots, timing, number)
        if will_go_on and stride > self._step:
            self._expand_end(number, hashes, timing)
        return Shared(
            read=lengths.read[0],
            if_ready=lengths.if_ready[0],
            if_kept=lengths.if_kept[0],
            writer=lengths.read[1] if lengths.read[0] else None,
            in_flight=lengths.if_ready[1] if lengths.if_ready[0] > lengths.read[0] else None,
            expired=lengths.if_kept[1] if lengths.if_kept[0] > lengths.read[0] else None,
        )

    def _lengths(
        self, table: PrefixTable, slots: Slots, timing: Timing, base: int, step: int
    ) -> _Lengths:
        """Lengths of leading keys that are stored; an ancestor is at least as alive as its child."""
        num_stored = _leading(slots >= 0)
        slots = slots[:num_stored]
        if timing.lookup_s is None:
            is_ready = is_kept = np.ones(num_stored, np.bool_)
        else:
            is_ready = table.ready_s[slots] <= timing.lookup_s
            is_kept = timing.lookup_s < table.used_s[slots] + self._lifetime_s

        def deepest(is_alive: NDArray[np.bool_]) -> tuple[int, int]:
            count = _leading(is_alive)
            return (base + count * step, int(table.writer[slots[count - 1]])) if count else (0, -1)

        return _Lengths(deepest(is_ready & is_kept), deepest(is_kept), deepest(is_ready))

    def _share_fine(
        self, number: int, hashes: Tokens, timing: Timing, slots: Slots, lengths: _Lengths
    ) -> None:
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
            lengths.add(self._lengths(self._fine, fine_slots, timing, start, self._step))
            self._touch(self._fine, fine, fine_slots, timing, number)

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
        self._touch(self._fine, fine, self._fine.find(fine), timing, number)

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

    def _touch(
        self, table: PrefixTable, keys: Tokens, slots: Slots, timing: Timing, number: int
    ) -> None:
        """Refresh what is stored, store what is not."""
        is_new = slots < 0
        old = slots[~is_new]
        if len(old):
            if timing.lookup_s is not None:
                is_dead = table.used_s[old] + self._lifetime_s <= timing.lookup_s
                dead = old[is_dead]
                table.ready_s[dead], table.used_s[dead] = timing.ready_s, timing.written_s
                table.writer[dead] = number
            table.ready_s[old] = np.minimum(table.ready_s[old], timing.ready_s)
            table.used_s[old] = np.maximum(table.used_s[old], timing.used_s)
        if is_new.any():
            new = table.insert(keys[is_new])
            table.ready_s[new], table.used_s[new] = timing.ready_s, timing.written_s
            table.owner[new] = table.writer[new] = number


def _leading(flags: NDArray[np.bool_]) -> int:
    """Number of true values before the first false."""
    return len(flags) if flags.all() else int(flags.argmin())
