"""Exact attention on CPU with torch alone: query rows against key blocks at fixed absolute positions.

The unit of arithmetic is one query row against one block of `BLOCK_KEYS` keys that starts at a
multiple of `BLOCK_KEYS`: a maximum, a sum of exponentials and a weighted sum of values, all in
float32. A row folds the results of its blocks strictly left to right (the online softmax of
Milakov and Gimelshein, 2018). What a row gets therefore depends on its own keys and on nothing
else: not on chunking, batch mates, pages, or on how much of its prefix was cached. The last block
is masked, never shortened; masked keys contribute nothing, whatever their bytes; a block that a
row does not see at all leaves it as it was, bit for bit, so that it may be skipped.

The products' rows are independent of each other in multiples of `FP32_ROW_MULTIPLE` rows;
`blocked_matmul` probes that on this machine and has a slower way for one where they are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backends.blocked_matmul import choose_matmul
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, ProbeStore
from ramify.attention.spec import AttentionSpec, reason_not_plain_mha

BLOCK_KEYS = 256  # large enough that a block's matmul hides the calls around it
MASKED_MAX = -1e30  # a maximum over nothing: finite, so that differences of maxima stay finite
MAX_SCORES = 1 << 20  # float32 scores in flight, 4 MB: beyond it blocks are taken fewer at a time


@dataclass(frozen=True, slots=True)
class QueryLenGroup:
    """Requests of a step with the same number of query rows, most key blocks first."""

    num_rows: int  # q_len * group, rounded up to a multiple of FP32_ROW_MULTIPLE
    q_len: int
    query_index: Tensor  # [lanes, q_len] int64, rows of q
    positions: Tensor  # [lanes, num_rows] int64, of each query row; padding rows see block 0
    num_blocks: list[int]  # per lane, descending
    slots: Tensor  # [lanes, max blocks * BLOCK_KEYS] int64; any valid slot beyond the keys
    kv_lens: Tensor  # [lanes] int64
    first_position: int  # the smallest position of a query row
    last_block_starts: int  # every block before this position is wholly within every lane
    masks: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)


class BlockedBackend:
    """Matmul over key blocks, ungrouped."""

    row_multiple = FP32_ROW_MULTIPLE

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._matmul, self._verdict = choose_matmul(
            spec.num_kv_heads, spec.head_dim, BLOCK_KEYS, ProbeStore.default()
        )
        self._scratch: dict[str, Tensor] = {}

    def exactness(self) -> list[Exactness]:
        """How the products are computed, and why."""
        return [self._verdict]

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Any model with plain K/V on CPU."""
        if device.type != "cpu":
            return f"device {device.type}: written for, and probed on, CPU"
        return reason_not_plain_mha(spec)

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> list[QueryLenGroup]:
        """Requests grouped by their number of query rows, with gather indices and positions."""
        groups: dict[int, list[int]] = defaultdict(list)
        lens = np.diff(batch.cu_seqlens_q)
        for seq, q_len in enumerate(lens.tolist()):
            groups[q_len].append(seq)
        return [self._query_len_group(batch, q_len, seqs) for q_len, seqs in sorted(groups.items())]

    def _query_len_group(self, batch: AttentionBatch, q_len: int, seqs: list[int]) -> QueryLenGroup:
        group = self.spec.gqa_group_size
        seqs = sorted(seqs, key=lambda seq: -int(batch.seq_lens_kv[seq]))
        kv_lens = batch.seq_lens_kv[seqs].astype(np.int64)
        ends = [self.padded_kv_len(int(length)) for length in kv_lens]
        slots = np.zeros((len(seqs), max(ends)), np.int64)
        for lane, seq in enumerate(seqs):
            slots[lane, : kv_lens[lane]] = batch.kv_slots(seq)
        rows = -(-q_len * group // self.row_multiple) * self.row_multiple
        start = kv_lens - q_len
        positions = np.zeros((len(seqs), rows), np.int64)
        positions[:, : q_len * group] = start[:, None] + np.repeat(np.arange(q_len), group)
        return QueryLenGroup(
            num_rows=rows,
            q_len=q_len,
            query_index=torch.from_numpy(
                batch.cu_seqlens_q[seqs].astype(np.int64)[:, None] + np.arange(q_len)
            ),
            positions=torch.from_numpy(positions),
            num_blocks=[-(-end // BLOCK_KEYS) for end in ends],
            slots=torch.from_numpy(slots),
            kv_lens=torch.from_numpy(kv_lens),
            first_position=int(start.min()),
            last_block_starts=int(kv_lens.min()) // BLOCK_KEYS * BLOCK_KEYS,
        )

    def padded_kv_len(self, kv_len: int) -> int:
        """Where the keys of a request end, in whole blocks."""
        return -(-kv_len // BLOCK_KEYS) * BLOCK_KEYS

    # -- once per layer ----------------------------------------------------------------------

    def run(
        self,
        plan: list[QueryLenGroup],
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        assert selected is None
        out = torch.zeros_like(q)
        keys, values = planes["k"].flatten(0, 1), planes["v"].flatten(0, 1)
        for lanes in plan:
            mixed = self._attend(lanes, self.spec.windows[layer], q, keys, values)
            out[lanes.query_index.flatten()] = mixed.to(q.dtype)
        return out

    def _attend(
        self, lanes: QueryLenGroup, window: int | None, q: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[lanes * q_len, num_heads, head_dim] float32."""
        spec = self.spec
        heads, group, dim = spec.num_kv_heads, spec.gqa_group_size, spec.head_dim
        num_lanes = len(lanes.num_blocks)
        rows = q[lanes.query_index].float() * spec.scale  # [lanes, q_len, num_heads, dim]
        folded = rows.new_zeros(num_lanes, heads, lanes.num_rows, dim)
        folded[:, :, : lanes.q_len * group] = (
            rows.view(num_lanes, lanes.q_len, heads, group, dim)
            .permute(0, 2, 1, 3, 4)
            .reshape(num_lanes, heads, lanes.q_len * group, dim)
        )
        state = OnlineSoftmaxState.empty(num_lanes, heads, lanes.num_rows, dim)
        block, last = 0, lanes.num_blocks[0]
        while block < last:
            active = sum(blocks > block for blocks in lanes.num_blocks)
            # lanes drop out at their own last block; a run of blocks ends where one does
            stop = min(blocks for blocks in lanes.num_blocks[:active])
            skip = self._rows_before(lanes, block)
            width = active * heads * (lanes.num_rows - skip) * BLOCK_KEYS
            stop = min(stop, block + max(1, MAX_SCORES // width), self._run_end(lanes, block))
            self._attend_blocks(
                lanes, window, folded, keys, values, state, (block, stop, active, skip)
            )
            block = stop
        weighted = state.acc / state.row_sum
        return (
            weighted[:, :, : lanes.q_len * group]
            .view(num_lanes, heads, lanes.q_len, group, dim)
            .permute(0, 2, 1, 3, 4)
            .reshape(num_lanes * lanes.q_len, heads * group, dim)
        )

    def _rows_before(self, lanes: QueryLenGroup, block: int) -> int:
        """Rows, in whole multiples, that see nothing of `block` or of any later one."""
        ahead = max(0, block * BLOCK_KEYS - lanes.first_position)
        if len(lanes.num_blocks) > 1:
            return 0
        return (
            min(ahead, lanes.q_len - 1)
            * self.spec.gqa_group_size
            // self.row_multiple
            * self.row_multiple
        )

    def _run_end(self, lanes: QueryLenGroup, block: int) -> int:
        """A run of blocks shares its rows: it ends before the next block that drops rows."""
        if (block + 1) * BLOCK_KEYS > lanes.first_position:
            return block + 1
        return max(block + 1, lanes.first_position // BLOCK_KEYS)

    def _attend_blocks(
        self,
        lanes: QueryLenGroup,
        window: int | None,
        folded: Tensor,
        keys: Tensor,
        values: Tensor,
        state: OnlineSoftmaxState,
        run: tuple[int, int, int, int],
    ) -> None:
        """Fold blocks [block, stop) of the first `active` lanes into rows `first_row` and on."""
        block, stop, active, skip = run
        num, heads, dim = stop - block, self.spec.num_kv_heads, self.spec.head_dim
        slots = lanes.slots[:active, block * BLOCK_KEYS : stop * BLOCK_KEYS].reshape(-1)
        shape = (active, num, BLOCK_KEYS, heads, dim)
        # [active, heads, num, BLOCK_KEYS, dim], contiguous: one layout for every product
        k, v = (
            self._gather(name, plane, slots, shape) for name, plane in (("k", keys), ("v", values))
        )
        hidden = self._mask(lanes, window, block, stop, active, skip)
        if stop * BLOCK_KEYS > lanes.last_block_starts:
            ends = (lanes.kv_lens[:active, None] - block * BLOCK_KEYS).view(active, 1, 1, 1)
            place = torch.arange(num * BLOCK_KEYS).view(1, num, BLOCK_KEYS, 1)
            v.masked_fill_((place >= ends)[:, None], 0.0)  # a recycled page may hold NaN
        rows = folded[:active, :, None, skip:].expand(-1, -1, num, -1, -1).contiguous()
        peak, weight, total = self._attend_block(rows, k, v, hidden)
        for index in range(num):
            state.merge_block(
                peak[:, :, index], weight[:, :, index], total[:, :, index], block + index, skip
            )

    def _attend_block(
        self, rows: Tensor, k: Tensor, v: Tensor, masked: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum, sum of weights and weighted sum of every row over each block of keys.

        Args:
            rows: [lanes, heads, blocks, rows, dim].
            k, v: [lanes, heads, blocks, BLOCK_KEYS, dim].
            masked: [lanes, blocks, rows, BLOCK_KEYS] or None.
        """
        scores = self._matmul(rows, k.transpose(-1, -2))
        if self.spec.soft_cap is not None:
            scores = torch.tanh(scores / self.spec.soft_cap) * self.spec.soft_cap
        if masked is not None:
            scores.masked_fill_(masked[:, None], -torch.inf)
        peak = scores.amax(-1, keepdim=True).clamp_min(MASKED_MAX)
        weights = scores.sub_(peak).exp_()
        total = self._matmul(weights, v)
        # 0 times what a row does not see may be NaN: such a row over its own keys alone
        for row in (~total.isfinite().all(-1).flatten(0, -2).all(0)).nonzero()[:, 0].tolist():
            own = v.masked_fill((weights[..., row, :] == 0)[..., None], 0.0)
            total[..., row, :] = self._matmul(weights, own)[..., row, :]
        return peak, weights.sum(-1, keepdim=True), total

    def _gather(
        self, name: str, plane: Tensor, slots: Tensor, shape: tuple[int, int, int, int, int]
    ) -> Tensor:
        """Keys or values of `slots` as float32 [lanes, heads, blocks, BLOCK_KEYS, dim].

        Into buffers that are kept: a fresh allocation costs more than the copy.
        """
        rows = self._buffer(f"{name} rows", (len(slots), *plane.shape[1:]), plane.dtype)
        torch.index_select(plane, 0, slots, out=rows)
        lanes, blocks, keys, heads, dim = shape
        dense = self._buffer(name, (lanes, heads, blocks, keys, dim), torch.float32)
        return dense.copy_(rows.view(shape).permute(0, 3, 1, 2, 4))

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape)
        kept = self._scratch.get(name)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = self._scratch[name] = torch.empty(size, dtype=dtype)
        return kept[:size].view(shape)

    def _mask(
        self,
        lanes: QueryLenGroup,
        window: int | None,
        block: int,
        stop: int,
        active: int,
        first_row: int,
    ) -> Tensor | None:
        """[active, blocks, rows, BLOCK_KEYS] bool, True where a row must not look; or None."""
        begin, end = block * BLOCK_KEYS, stop * BLOCK_KEYS
        if end - 1 <= lanes.first_position and window is None:
            return None
        place = (window, block, active)
        if place not in lanes.masks:
            at = torch.arange(begin, end).view(1, stop - block, 1, BLOCK_KEYS)
            seen_from = lanes.positions[:active, None, first_row:, None]
            hidden = at > seen_from
            if window is not None:
                hidden |= at <= seen_from - window
            lanes.masks[place] = hidden
        return lanes.masks[place]


@dataclass(frozen=True, slots=True)
class OnlineSoftmaxState:
    """Running maximum, sum of weights and weighted sum of every row, float32, updated in place."""

    row_max: Tensor  # [lanes, heads, rows, 1]
    row_sum: Tensor  # [lanes, heads, rows, 1]
    acc: Tensor  # [lanes, heads, rows, dim]

    @classmethod
    def empty(cls, lanes: int, heads: int, rows: int, dim: int) -> OnlineSoftmaxState:
        """Of rows that have seen no key."""
        one = torch.full((lanes, heads, rows, 1), MASKED_MAX)
        return cls(one, torch.zeros_like(one), torch.zeros(lanes, heads, rows, dim))

    def merge_block(
        self, row_max: Tensor, row_sum: Tensor, acc: Tensor, block: int, first_row: int
    ) -> None:
        """One block's results for the first lanes and for rows `first_row` and on."""
        active = len(row_max)
        mine = (self.row_max[:active, :, first_row:], self.row_sum[:active, :, first_row:])
        sums = self.acc[:active, :, first_row:]
        if block == 0:  # folding into nothing: the same bits, without the work
            mine[0].copy_(row_max)
            mine[1].copy_(row_sum)
            sums.copy_(acc)
            return
        top = torch.maximum(mine[0], row_max)
        old, new = (mine[0] - top).exp_(), (row_max - top).exp_()
        mine[1].mul_(old).add_(row_sum * new)
        sums.mul_(old).add_(acc * new)
        mine[0].copy_(top)
