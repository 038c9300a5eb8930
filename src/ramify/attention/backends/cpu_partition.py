"""A step of attention, cut into tasks: some query rows, some heads, a run of key blocks.

Requests that begin with the same pages (the tree says so) form one task for the blocks in them, so
that a block is read and laid out once for all; then each goes on alone. Tasks of one phase may run
in any order; a row's phases follow each other, so that its blocks are folded left to right. Where
few rows read many blocks, workers take the blocks, and whoever finishes last folds them in order.
What a task is decides who shares a read and never a bit of the result: see
`kernels.cpu.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.kernels.cpu.abi import BLOCK_KEYS

TASK_ROWS = 256  # rows for which laying out a block is no longer worth noticing
MULTI_HEAD_ROWS = (
    32  # with fewer, a task takes several heads: their K/V lies side by side in memory
)
ATTENTION_TASKS_PER_WORKER = 4  # so that a worker that is interrupted does not hold up the others
TASK_FIELDS = 10  # columns of a task
MAX_SPLIT_FLOATS = 1 << 22  # of a split, for results of blocks; with more, heads are cut instead


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """A step, cut up: see `kernels.cpu.paged_attention` for the columns of a task and of a split."""

    tasks: NDArray[np.int64]  # [n, 10], phase by phase
    starts: NDArray[np.int64]  # [phases + 1]: where each begins among them, and the end
    phases: list[NDArray[np.int64]]  # the tasks of each
    splits: NDArray[np.int64]  # [m, 5]
    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    table: NDArray[np.int32]
    page_size: int
    num_tokens: int
    max_rows: int  # of a task, in all its heads
    state_head_stride: int  # of `state`, from a head to the next
    state_rows: int  # of all heads, then of the splits


class TaskPartitioner:
    """Tasks in the making.

    Args:
        positions: [T] int64, of each token of q in its request.
        state_width: floats of a row of `state`.
    """

    def __init__(
        self,
        positions: NDArray[np.int64],
        *,
        num_heads: int,
        num_kv_heads: int,
        windows: Sequence[int | None],
        num_workers: int,
        state_width: int,
    ) -> None:
        self._heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._num_workers, self._state_width = num_workers, state_width
        widest = max(filter(None, windows), default=0)
        self._window = widest if all(windows) else 0  # 0: a layer sees everything
        self._positions, self._at = positions, positions.tolist()
        self._tokens: list[int] = []
        self._phases: list[list[tuple[int, ...]]] = []
        self._splits: list[tuple[int, ...]] = []
        self._state_head_stride = (
            len(positions) | 1
        )  # else heads may meet in the same places of a cache
        self._state_rows = self._state_head_stride * num_heads

    @property
    def target_tasks(self) -> int:
        """Pieces of a whole step, about."""
        return ATTENTION_TASKS_PER_WORKER * self._num_workers

    def add_batch(self, batch: AttentionBatch) -> None:
        """All rows of a step with all that they see: what they share first."""
        starts = batch.cu_seqlens_q.tolist()
        requests = [range(*ends) for ends in pairwise(starts)]
        done, level = [0] * batch.num_seqs, [0] * batch.num_seqs
        for members, end in shared_prefix_groups(batch):
            first = members[0]
            tokens = [*chain.from_iterable(requests[i] for i in members)]
            self.add_rows(level[first], first, tokens, (done[first], end), self.target_tasks)
            for i in members:
                done[i], level[i] = end, level[i] + 1
        lasts = [-(-kv_len // BLOCK_KEYS) for kv_len in batch.seq_lens_kv.tolist()]
        total = max(1, sum(lasts) - sum(done))
        for i, last in enumerate(lasts):
            # As few as will do: two workers that read halves of the same rows hinder each other.
            pieces = -(-self.target_tasks * (last - done[i]) // total)
            pieces = min(pieces, 2 * self._num_workers)
            self.add_rows(level[i], i, requests[i], (done[i], last), pieces)

    def add_rows(
        self,
        level: int,
        seq: int,
        tokens: Sequence[int],
        blocks: tuple[int, int],
        pieces: int,
    ) -> None:
        """Tasks for some tokens of q against blocks [from, to) of a request's keys.

        In plain Python: of few tokens an array costs more than it saves.

        Args:
            level: the phase.
            pieces: how many, about; with few rows more than one means one for each block.
        """
        begin, end = blocks
        while len(self._phases) <= level:
            self._phases.append([])
        tasks = self._phases[level]
        if len(tokens) == pieces == 1 and self._group < MULTI_HEAD_ROWS:  # as most are
            stop = min(end, self._at[tokens[0]] // BLOCK_KEYS + 1)
            if stop > begin:
                whole = 0, self._heads, 0, self._group, begin, stop, -1
                tasks.append((seq, len(self._tokens), 1, *whole))
            self._tokens.append(tokens[0])
            return
        per_task = max(1, TASK_ROWS // self._group)
        num_tiles = -(-len(tokens) // per_task)
        for tile in range(num_tiles):
            some = tokens[tile * per_task : (tile + 1) * per_task]
            first, where = len(self._tokens), [self._at[token] for token in some]
            self._tokens += some
            lowest, highest = min(where), max(where)
            stop = min(end, highest // BLOCK_KEYS + 1)
            if stop <= begin:
                continue
            of_tile = max(1, -(-pieces // num_tiles))  # if it can be cut so far
            rows = seq, first, len(some)
            seen = max(begin, (lowest + 1 - self._window) // BLOCK_KEYS) if self._window else begin
            full = min(stop, (highest + 1 + BLOCK_KEYS // 2) // BLOCK_KEYS)  # by half or more
            if of_tile > 1 and self._uses_split_kv(len(some), full - seen):
                tasks += self._split_by_blocks(rows, (seen, full, stop), is_first=begin == 0)
            else:
                tasks += self._split_by_heads(rows, begin, stop, of_tile)

    def build(self, table: NDArray[np.int32], page_size: int) -> CpuAttentionPlan:
        """Those with the highest cost first."""
        phases = [sorted(phase, key=_cost, reverse=True) for phase in self._phases if phase]
        tasks = np.array([*chain.from_iterable(phases)], np.int64).reshape(-1, TASK_FIELDS)
        starts = np.cumsum([0, *map(len, phases)])
        most = ((tasks[:, 4] - tasks[:, 3]) * tasks[:, 2] * (tasks[:, 6] - tasks[:, 5])).tolist()
        tokens = np.array(self._tokens, np.int64)
        return CpuAttentionPlan(
            tasks,
            starts,
            [tasks[a:b] for a, b in pairwise(starts.tolist())],
            np.array(self._splits, np.int64).reshape(-1, 5),
            tokens,
            self._positions[tokens],
            table=readonly_contiguous(table),
            page_size=page_size,
            num_tokens=len(self._positions),
            max_rows=max(most, default=0),
            state_head_stride=self._state_head_stride,
            state_rows=self._state_rows,
        )

    def _uses_split_kv(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether so many blocks are cut, in place of heads: few rows, whose K/V lies side by side."""
        if num_tokens * self._group >= MULTI_HEAD_ROWS or not 1 < self._num_workers <= num_blocks:
            return False
        rows = num_tokens * self._group * self._heads * num_blocks
        return rows * self._state_width <= MAX_SPLIT_FLOATS

    def _split_by_blocks(
        self, rows: tuple[int, int, int], blocks: tuple[int, int, int], *, is_first: bool
    ) -> list[tuple[int, ...]]:
        """A block a task, as many for each worker; some heads of each that is left over.

        Args:
            blocks: from, to which they are full, by half at least, to.
        """
        heads, workers, joint = self._heads, self._num_workers, len(self._splits)
        begin, full, stop = blocks
        whole = begin + (full - begin) // workers * workers
        tasks: list[tuple[int, ...]] = []
        for block in range(begin, stop):
            step = heads if block < whole else -(-heads // workers)
            for head in range(0, heads, step):
                span = head, min(heads, head + step), 0, self._group, block, block + 1
                tasks.append((*rows, *span, joint))
        self._splits.append((begin, stop, self._state_rows, len(tasks), is_first))
        self._state_rows += (stop - begin) * rows[2] * heads * self._group
        return tasks

    def _split_by_heads(
        self, rows: tuple[int, int, int], begin: int, stop: int, pieces: int
    ) -> list[tuple[int, ...]]:
        group, heads = self._group, self._heads
        head_step = 1 if rows[2] * group >= MULTI_HEAD_ROWS else -(-heads // pieces)
        least = min(pieces, 2 * self._num_workers)  # heads of a group read the same keys
        group_step = max(1, group * heads // least) if heads < least else group
        return [
            (*rows, head, min(heads, head + head_step), g, min(group, g + group_step), begin, stop, -1)
            for head in range(0, heads, head_step)
            for g in range(0, group, group_step)
        ]  # fmt: skip


def shared_prefix_groups(batch: AttentionBatch) -> list[tuple[list[int], int]]:
    """Requests that read the same whole blocks, and up to which block; shorter runs first.

    Each request's runs follow each other: the first begins at block 0, the next where one ends.
    """
    ends = sorted({int(length) // BLOCK_KEYS for length in batch.shared_len} - {0})
    runs: list[tuple[list[int], int]] = []
    for end in ends:
        groups: dict[int, list[int]] = {}
        for i, leader in enumerate(batch.prefix_leaders(end * BLOCK_KEYS)):
            groups.setdefault(leader, []).append(i)
        for members in groups.values():
            if len(members) > 1:
                # the same requests have a longer run in common than was thought so far
                runs = [run for run in runs if run[0] != members]
                runs.append((members, end))
    return runs


def _cost(task: Sequence[int]) -> int:
    _, _, count, head0, head1, group0, group1, block0, block1, _ = task
    return count * (head1 - head0) * (group1 - group0) * (block1 - block0)


def readonly_contiguous(array: NDArray[np.int32]) -> NDArray[np.int32]:
    """A read-only view in C order: for any other kind of array the kernel would be compiled anew."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
