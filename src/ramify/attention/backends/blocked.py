"""Exact attention on CPU with torch matmuls over key blocks at fixed absolute positions.

The unit of arithmetic is a query row against a block of `BLOCK_KEYS` keys that starts at a multiple
of `BLOCK_KEYS`: row max, sum of exponentials and weighted sum of values, in float32. A row merges
its blocks strictly left to right (online softmax; Milakov and Gimelshein, 2018). Its result
therefore depends on its own keys only: not on chunking, batch, pages or cached prefix. The last
block is masked, never shortened. Masked keys contribute nothing, whatever their bytes; merging a
fully masked block changes no bit, so that such blocks are skipped.

Rows of the matmuls must be independent in multiples of `FP32_ROW_MULTIPLE`: `blocked_matmul` probes
that on this machine, and has a slower matmul for machines where it is not so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backends.blocked_matmul import choose_matmul
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, ProbeStore
from ramify.attention.gather import MASKED_MAX, gather_rows
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import AttentionSpec, reason_not_plain_mha

BLOCK_KEYS = 256  # large enough that a block's matmul hides the calls around it
MAX_SCORES = 1 << 20  # float32 scores in flight (4 MB); limits the blocks of one matmul


@dataclass(frozen=True, slots=True)
class QueryLenGroup:
    """The n requests of a step that have `q_len` query rows, most key blocks first."""

    num_rows: int  # q_len * GQA group size, rounded up to a multiple of FP32_ROW_MULTIPLE
    q_len: int
    query_index: Tensor  # [n, q_len] int64, rows of q
    positions: Tensor  # [n, num_rows] int64, of each query row; 0 for padding rows
    num_blocks: list[int]  # per request, descending
    slots: Tensor  # [n, max blocks * BLOCK_KEYS] int64; any valid slot beyond the keys
    kv_lens: Tensor  # [n] int64
    first_position: int  # the smallest position of a query row
    last_block_starts: int  # the first position that is not in a full block of every request
    masks: dict[tuple[int | None, int, int], Tensor] = field(default_factory=dict)


class BlockedBackend:
    """Batched matmuls over blocks of gathered K/V; requests with equal `q_len` go together."""

    row_multiple = FP32_ROW_MULTIPLE

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        self._matmul, self._verdict = choose_matmul(
            spec.num_kv_heads, spec.head_dim, BLOCK_KEYS, ProbeStore.default()
        )
        self._scratch: dict[str, Tensor] = {}

    def exactness(self) -> list[Exactness]:
        """The strategy of the matmuls, and why."""
        return [self._verdict]

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Any model with plain K/V on CPU."""
        if device.type != "cpu":
            return f"device {device.type}: written for, and probed on, CPU"
        return reason_not_plain_mha(spec)

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> list[QueryLenGroup]:
        """Group requests by their number of query rows. Called once per step."""
        groups: dict[int, list[int]] = defaultdict(list)
        lens = np.diff(batch.cu_seqlens_q)
        for seq, q_len in enumerate(lens.tolist()):
            if q_len:
                groups[q_len].append(seq)
        return [self._query_len_group(batch, q_len, seqs) for q_len, seqs in sorted(groups.items())]

    def _query_len_group(self, batch: AttentionBatch, q_len: int, seqs: list[int]) -> QueryLenGroup:
        """Gather indices, positions and slots of the requests `seqs`."""
        gqa = self.spec.gqa_group_size
        seqs = sorted(seqs, key=lambda seq: -int(batch.seq_lens_kv[seq]))
        kv_lens = batch.seq_lens_kv[seqs].astype(np.int64)
        num_blocks = -(-kv_lens // BLOCK_KEYS)
        slots = np.zeros((len(seqs), num_blocks.max() * BLOCK_KEYS), np.int64)
        for index, seq in enumerate(seqs):
            slots[index, : kv_lens[index]] = batch.kv_slots(seq)
        rows = -(-q_len * gqa // self.row_multiple) * self.row_multiple
        start = kv_lens - q_len
        positions = np.zeros((len(seqs), rows), np.int64)
        positions[:, : q_len * gqa] = start[:, None] + np.repeat(np.arange(q_len), gqa)
        return QueryLenGroup(
            num_rows=rows,
            q_len=q_len,
            query_index=torch.from_numpy(
                batch.cu_seqlens_q[seqs].astype(np.int64)[:, None] + np.arange(q_len)
            ),
            positions=torch.from_numpy(positions),
            num_blocks=num_blocks.tolist(),
            slots=torch.from_numpy(slots),
            kv_lens=torch.from_numpy(kv_lens),
            first_position=int(start.min()),
            last_block_starts=int(kv_lens.min()) // BLOCK_KEYS * BLOCK_KEYS,
        )

    # -- once per layer ----------------------------------------------------------------------

    def run(
        self,
        plan: list[QueryLenGroup],
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        num_tokens = sum(group.query_index.numel() for group in plan)
        self._inputs.validate(num_tokens, layer, q, planes, selected, sinks)
        out = torch.zeros_like(q)
        keys, values = planes["k"].flatten(0, 1), planes["v"].flatten(0, 1)
        for group in plan:
            state = self._attend(group, self.spec.windows[layer], q, keys, values)
            attended = self._output(group, state, sinks)
            out[group.query_index.flatten()] = attended.to(q.dtype)
        return out

    def _attend(
        self, group: QueryLenGroup, window: int | None, q: Tensor, keys: Tensor, values: Tensor
    ) -> OnlineSoftmaxState:
        """Attention of a group over all its blocks."""
        spec = self.spec
        heads, gqa, dim = spec.num_kv_heads, spec.gqa_group_size, spec.head_dim
        n, q_len = group.query_index.shape
        rows = q[group.query_index].float() * spec.scale  # [n, q_len, num_heads, dim]
        q_rows = rows.new_zeros(n, heads, group.num_rows, dim)
        q_rows[:, :, : q_len * gqa] = (
            rows.view(n, q_len, heads, gqa, dim)
            .permute(0, 2, 1, 3, 4)
            .reshape(n, heads, q_len * gqa, dim)
        )
        state = OnlineSoftmaxState.empty(n, heads, group.num_rows, dim)
        block, last = 0, group.num_blocks[0]
        while block < last:
            active = sum(num_blocks > block for num_blocks in group.num_blocks)
            # the next blocks in one matmul: as long as the same requests and rows take part
            stop = min(group.num_blocks[:active])
            first_row = self._first_row(group, block)
            width = active * heads * (group.num_rows - first_row) * BLOCK_KEYS
            stop = min(stop, block + max(1, MAX_SCORES // width), self._run_end(group, block))
            run = block, stop, active, first_row
            self._attend_blocks(group, window, q_rows, keys, values, state, run)
            block = stop
        return state

    def _output(
        self, group: QueryLenGroup, state: OnlineSoftmaxState, sinks: Tensor | None
    ) -> Tensor:
        """Attention's output of a group: [n * q_len, num_heads, head_dim] float32."""
        heads, gqa = self.spec.num_kv_heads, self.spec.gqa_group_size
        n, q_len = group.query_index.shape
        row_sum = state.row_sum
        if sinks is not None:
            of_rows = sinks.view(heads, gqa)[:, torch.arange(group.num_rows) % gqa, None]
            row_sum = row_sum + (of_rows - state.row_max).exp_()
        out = state.acc / row_sum
        return (
            out[:, :, : q_len * gqa]
            .view(n, heads, q_len, gqa, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(n * q_len, heads * gqa, -1)
        )

    def _first_row(self, group: QueryLenGroup, block: int) -> int:
        """The first row to compute, a multiple of `row_multiple`: earlier rows see no key of `block`."""
        tokens_before = max(0, block * BLOCK_KEYS - group.first_position)
        if len(group.num_blocks) > 1:
            return 0
        rows = min(tokens_before, group.q_len - 1) * self.spec.gqa_group_size
        return rows // self.row_multiple * self.row_multiple

    def _run_end(self, group: QueryLenGroup, block: int) -> int:
        """The next block at which fewer rows take part."""
        if (block + 1) * BLOCK_KEYS > group.first_position:
            return block + 1
        return max(block + 1, group.first_position // BLOCK_KEYS)

    def _attend_blocks(
        self,
        group: QueryLenGroup,
        window: int | None,
        q_rows: Tensor,
        keys: Tensor,
        values: Tensor,
        state: OnlineSoftmaxState,
        run: tuple[int, int, int, int],
    ) -> None:
        """Merge blocks [block, stop) into `state` for `active` requests and rows from `first_row`."""
        block, stop, active, first_row = run
        num, heads, dim = stop - block, self.spec.num_kv_heads, self.spec.head_dim
        slots = group.slots[:active, block * BLOCK_KEYS : stop * BLOCK_KEYS].reshape(-1)
        shape = (active, num, BLOCK_KEYS, heads, dim)
        # [active, heads, num, BLOCK_KEYS, dim], contiguous: every matmul has the same layout
        k, v = (
            self._gather(name, plane, slots, shape) for name, plane in (("k", keys), ("v", values))
        )
        mask = self._mask(group, window, block, stop, active, first_row)
        if stop * BLOCK_KEYS > group.last_block_starts:
            ends = (group.kv_lens[:active, None] - block * BLOCK_KEYS).view(active, 1, 1, 1)
            key = torch.arange(num * BLOCK_KEYS).view(1, num, BLOCK_KEYS, 1)
            v.masked_fill_((key >= ends)[:, None], 0.0)  # a recycled page may hold NaN
        rows = q_rows[:active, :, None, first_row:].expand(-1, -1, num, -1, -1).contiguous()
        partial = self._attend_block(rows, k, v, mask)
        for index in range(num):
            row_max, row_sum, acc = (result[:, :, index] for result in partial)
            state.merge_block(row_max, row_sum, acc, block + index, first_row)

    def _attend_block(
        self, rows: Tensor, k: Tensor, v: Tensor, masked: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row max, row sum and unnormalised output of every row over each block of keys.

        Args:
            rows: [n, heads, blocks, rows, dim].
            k, v: [n, heads, blocks, BLOCK_KEYS, dim].
            masked: [n, blocks, rows, BLOCK_KEYS] bool or None.
        """
        scores = self._matmul(rows, k.transpose(-1, -2))
        if self.spec.soft_cap is not None:
            scores = torch.tanh(scores / self.spec.soft_cap) * self.spec.soft_cap
        if masked is not None:
            scores.masked_fill_(masked[:, None], -torch.inf)
        row_max = scores.amax(-1, keepdim=True).clamp_min(MASKED_MAX)
        weights = scores.sub_(row_max).exp_()
        acc = self._matmul(weights, v)
        # 0 times a non-finite value that the row does not see is NaN: redo it without those values
        for row in (~acc.isfinite().all(-1).flatten(0, -2).all(0)).nonzero()[:, 0].tolist():
            visible = v.masked_fill((weights[..., row, :] == 0)[..., None], 0.0)
            acc[..., row, :] = self._matmul(weights, visible)[..., row, :]
        return row_max, weights.sum(-1, keepdim=True), acc

    def _gather(
        self, name: str, plane: Tensor, slots: Tensor, shape: tuple[int, int, int, int, int]
    ) -> Tensor:
        """Keys or values of `slots` as float32 [n, heads, blocks, BLOCK_KEYS, dim], in a reused buffer."""
        rows = gather_rows(self._scratch, f"{name} rows", plane, slots)
        n, blocks, keys, heads, dim = shape
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < rows.numel():
            buffer = self._scratch[name] = torch.empty(rows.numel())
        dense = buffer[: rows.numel()].view(n, heads, blocks, keys, dim)
        return dense.copy_(rows.view(shape).permute(0, 3, 1, 2, 4))

    def _mask(
        self,
        group: QueryLenGroup,
        window: int | None,
        block: int,
        stop: int,
        active: int,
        first_row: int,
    ) -> Tensor | None:
        """True where masked: [active, blocks, rows, BLOCK_KEYS] bool; None if nothing is."""
        begin, end = block * BLOCK_KEYS, stop * BLOCK_KEYS
        if end - 1 <= group.first_position and window is None:
            return None
        cache_key = (window, block, active)
        if cache_key not in group.masks:
            keys = torch.arange(begin, end).view(1, stop - block, 1, BLOCK_KEYS)
            positions = group.positions[:active, None, first_row:, None]
            mask = keys > positions
            if window is not None:
                mask |= keys <= positions - window
            group.masks[cache_key] = mask
        return group.masks[cache_key]


@dataclass(frozen=True, slots=True)
class OnlineSoftmaxState:
    """Running row max, row sum and unnormalised output of every row, float32, in place."""

    row_max: Tensor  # [n, heads, rows, 1]
    row_sum: Tensor  # [n, heads, rows, 1]
    acc: Tensor  # [n, heads, rows, dim]

    @classmethod
    def empty(cls, n: int, heads: int, rows: int, dim: int) -> OnlineSoftmaxState:
        """The state before the first block."""
        row_max = torch.full((n, heads, rows, 1), MASKED_MAX)
        return cls(row_max, torch.zeros_like(row_max), torch.zeros(n, heads, rows, dim))

    def merge_block(
        self, row_max: Tensor, row_sum: Tensor, acc: Tensor, block: int, first_row: int
    ) -> None:
        """Merge a block's results for the first `len(row_max)` requests, rows from `first_row`."""
        own_max, own_sum, own_acc = (
            state[: len(row_max), :, first_row:] for state in (self.row_max, self.row_sum, self.acc)
        )
        if block == 0:  # merging into the empty state gives the same bits, with more work
            own_max.copy_(row_max)
            own_sum.copy_(row_sum)
            own_acc.copy_(acc)
            return
        merged_max = torch.maximum(own_max, row_max)
        old, new = (own_max - merged_max).exp_(), (row_max - merged_max).exp_()
        own_sum.mul_(old).add_(row_sum * new)
        own_acc.mul_(old).add_(acc * new)
        own_max.copy_(merged_max)
