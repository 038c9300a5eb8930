"""Partition a step of attention into tasks for the CPU workers: rows × heads × key blocks.

Requests that share a prefix form one task for its blocks, so that a block is read and packed once
for all; after it each request has tasks of its own. Tasks of a phase may run in any order; phases
run one after the other, so that a row merges its blocks left to right. Where few rows read many
blocks (split-KV), workers take one block each, and the last one to finish merges them in order.
The partition decides what is read together, never the bits: see `kernels.cpu.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.kernels.cpu.abi import BLOCK_KEYS

TASK_ROWS = 256  # rows of a task and head: enough to make packing a block cheap
MULTI_HEAD_ROWS = 32  # with fewer rows a task takes several heads: their K/V is adjacent in memory
ATTENTION_TASKS_PER_WORKER = 4  # so that an interrupted worker does not hold up the others
TASK_FIELDS = 10  # columns of a task
MAX_SPLIT_FLOATS = 1 << 22  # block results of a split; beyond it, split by heads instead


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """A partitioned step; `kernels.cpu.paged_attention` has the columns of tasks and splits."""

    tasks: NDArray[np.int64]  # [n, TASK_FIELDS], phase by phase
    starts: NDArray[np.int64]  # [phases + 1] index of each phase's first task, and n
    phases: list[NDArray[np.int64]]  # the tasks of each phase
    splits: NDArray[np.int64]  # [m, 5]
    tokens: NDArray[np.int64]  # rows of q, in the order of the tasks
    positions: NDArray[np.int64]  # of `tokens`
    table: NDArray[np.int32]  # block table [B, P]
    page_size: int
    num_tokens: int
    max_rows: int  # of a task, over all its heads
    state_head_stride: int  # rows of `state` from a head to the next
    state_rows: int  # rows of `state`: all heads, then the splits' blocks


class TaskPartitioner:
    """Builds a `CpuAttentionPlan`: `add_batch` or `add_rows`, then `build`.

    Args:
        positions: [T] int64, position of each row of q in its request.
        state_width: floats per row of `state`.
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
        self._window = widest if all(windows) else 0  # 0: some layer has no window
        self._positions, self._position_list = positions, positions.tolist()
        self._tokens: list[int] = []
        self._phases: list[list[tuple[int, ...]]] = []
        self._splits: list[tuple[int, ...]] = []
        self._state_head_stride = len(positions) | 1  # odd: heads fall into different cache sets
        self._state_rows = self._state_head_stride * num_heads

    @property
    def target_tasks(self) -> int:
        """The number of tasks to aim at for a whole step."""
        return ATTENTION_TASKS_PER_WORKER * self._num_workers

    def add_batch(self, batch: AttentionBatch) -> None:
        """Add all rows of a step: first what requests share, then the keys of each alone."""
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
            # No more than needed: workers that read parts of the same rows hinder each other.
            num_tasks = -(-self.target_tasks * (last - done[i]) // total)
            num_tasks = min(num_tasks, 2 * self._num_workers)
            self.add_rows(level[i], i, requests[i], (done[i], last), num_tasks)

    def add_rows(
        self,
        level: int,
        seq: int,
        tokens: Sequence[int],
        blocks: tuple[int, int],
        num_tasks: int,
    ) -> None:
        """Add tasks for some rows of q over blocks [begin, end) of a request's keys.

        Plain Python: for few tokens, arrays cost more than they save.

        Args:
            level: the phase.
            num_tasks: to aim at; with few rows, more than one means one per block.
        """
        begin, end = blocks
        while len(self._phases) <= level:
            self._phases.append([])
        tasks = self._phases[level]
        if len(tokens) == num_tasks == 1 and self._group < MULTI_HEAD_ROWS:  # the usual decode
            stop = min(end, self._position_list[tokens[0]] // BLOCK_KEYS + 1)
            if stop > begin:
                whole = 0, self._heads, 0, self._group, begin, stop, -1
                tasks.append((seq, len(self._tokens), 1, *whole))
            self._tokens.append(tokens[0])
            return
        per_task = max(1, TASK_ROWS // self._group)
        num_tiles = -(-len(tokens) // per_task)
        for tile in range(num_tiles):
            tile_tokens = tokens[tile * per_task : (tile + 1) * per_task]
            positions = [self._position_list[token] for token in tile_tokens]
            rows = seq, len(self._tokens), len(tile_tokens)
            self._tokens += tile_tokens
            lowest, highest = min(positions), max(positions)
            stop = min(end, highest // BLOCK_KEYS + 1)
            if stop <= begin:
                continue
            tile_tasks = max(1, -(-num_tasks // num_tiles))
            visible = begin
            if self._window:
                visible = max(begin, (lowest + 1 - self._window) // BLOCK_KEYS)
            full = min(stop, (highest + 1 + BLOCK_KEYS // 2) // BLOCK_KEYS)  # half full or more
            if tile_tasks > 1 and self._uses_split_kv(len(tile_tokens), full - visible):
                tasks += self._split_by_blocks(rows, (visible, full, stop), is_first=begin == 0)
            else:
                tasks += self._split_by_heads(rows, begin, stop, tile_tasks)

    def build(self, table: NDArray[np.int32], page_size: int) -> CpuAttentionPlan:
        """The plan of all added rows; in each phase the most expensive tasks come first."""
        phases = [sorted(phase, key=_cost, reverse=True) for phase in self._phases if phase]
        tasks = np.array([*chain.from_iterable(phases)], np.int64).reshape(-1, TASK_FIELDS)
        starts = np.cumsum([0, *map(len, phases)])
        rows = ((tasks[:, 4] - tasks[:, 3]) * tasks[:, 2] * (tasks[:, 6] - tasks[:, 5])).tolist()
        tokens = np.array(self._tokens, np.int64)
        return CpuAttentionPlan(
            tasks,
            starts,
            [tasks[begin:end] for begin, end in pairwise(starts.tolist())],
            np.array(self._splits, np.int64).reshape(-1, 5),
            tokens,
            self._positions[tokens],
            table=readonly_contiguous(table),
            page_size=page_size,
            num_tokens=len(self._positions),
            max_rows=max(rows, default=0),
            state_head_stride=self._state_head_stride,
            state_rows=self._state_rows,
        )

    def _uses_split_kv(self, num_tokens: int, num_blocks: int) -> bool:
        """Whether to split by blocks, not heads: few rows, and at least a block per worker."""
        if num_tokens * self._group >= MULTI_HEAD_ROWS or not 1 < self._num_workers <= num_blocks:
            return False
        rows = num_tokens * self._group * self._heads * num_blocks
        return rows * self._state_width <= MAX_SPLIT_FLOATS

    def _split_by_blocks(
        self, rows: tuple[int, int, int], blocks: tuple[int, int, int], *, is_first: bool
    ) -> list[tuple[int, ...]]:
        """Split-KV: a task per block, equally many per worker; the remaining blocks also by heads.

        Args:
            blocks: begin, end of those at least half full, end.
        """
        heads, workers, split = self._heads, self._num_workers, len(self._splits)
        begin, full, stop = blocks
        whole = begin + (full - begin) // workers * workers
        tasks: list[tuple[int, ...]] = []
        for block in range(begin, stop):
            step = heads if block < whole else -(-heads // workers)
            for head in range(0, heads, step):
                part = head, min(heads, head + step), 0, self._group, block, block + 1
                tasks.append((*rows, *part, split))
        self._splits.append((begin, stop, self._state_rows, len(tasks), is_first))
        self._state_rows += (stop - begin) * rows[2] * heads * self._group
        return tasks

    def _split_by_heads(
        self, rows: tuple[int, int, int], begin: int, stop: int, num_tasks: int
    ) -> list[tuple[int, ...]]:
        """Split by K/V heads; by the query heads of a group only if there are few K/V heads."""
        group, heads = self._group, self._heads
        head_step = 1 if rows[2] * group >= MULTI_HEAD_ROWS else -(-heads // num_tasks)
        least = min(num_tasks, 2 * self._num_workers)
        group_step = max(1, group * heads // least) if heads < least else group
        return [
            (*rows, head, min(heads, head + head_step), g, min(group, g + group_step), begin, stop, -1)
            for head in range(0, heads, head_step)
            for g in range(0, group, group_step)
        ]  # fmt: skip


def shared_prefix_groups(batch: AttentionBatch) -> list[tuple[list[int], int]]:
    """(requests, end): requests that read the same blocks up to block `end`, ascending by `end`.

    The groups of a request continue each other: each begins at the block where the last one ended,
    the first at block 0.
    """
    ends = sorted({int(length) // BLOCK_KEYS for length in batch.shared_len} - {0})
    shared: list[tuple[list[int], int]] = []
    for end in ends:
        groups: dict[int, list[int]] = {}
        for i, leader in enumerate(batch.prefix_leaders(end * BLOCK_KEYS)):
            groups.setdefault(leader, []).append(i)
        for members in groups.values():
            if len(members) > 1:
                # the same requests share more blocks: replace their shorter group
                shared = [group for group in shared if group[0] != members]
                shared.append((members, end))
    return shared


def _cost(task: Sequence[int]) -> int:
    _, _, count, head0, head1, group0, group1, block0, block1, _ = task
    return count * (head1 - head0) * (group1 - group0) * (block1 - block0)


def readonly_contiguous(array: NDArray[np.int32]) -> NDArray[np.int32]:
    """A read-only C-ordered view: for another array type, Numba would compile the kernel again."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view
