"""Attention of decode steps that graphs can capture: by plain torch operations, or by a backend's own plan."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.paged import PagedAttention, PagedBackend
from ramify.attention.spec import AttentionSpec
from ramify.engine.execution.decode_attention import DecodeAttention
from ramify.engine.execution.decode_rows import DecodeRows
from ramify.engine.execution.host_copies import to_device
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.ops.protocol import Attention

MAX_CHANGES = 4096  # table entries in the upload of a step; beyond, a copy of their own


class DecodeSource(Protocol):
    """What the attention of decode steps reads, in tensors whose addresses stay."""

    @property
    def max_words(self) -> int:
        """Most words of `update`."""

    def update(self, plan: StepPlan, bucket: int) -> tuple[Hashable, NDArray[np.int64]]:
        """Prepare a step of `bucket` rows, padding included.

        Returns:
            what a graph of the step depends on beside its bucket, and words to upload.
        """

    def receive(self, words: Tensor) -> None:
        """Take the uploaded words [n] int64; the first is at the same address in every step."""

    def attention(self, key: Hashable, positions: Tensor, slots: Tensor) -> Attention:
        """The attention of the prepared step: [bucket] int64 each, at the addresses of every step."""

    def forget(self) -> None:
        """A step failed: nobody knows what the device has."""


class TorchSource:
    """A block table on the device, of which a step uploads the entries that have changed.

    Args:
        spec: see `supports`.
        num_rows: most requests of a step.
        max_pages: of a request.
    """

    def __init__(self, spec: AttentionSpec, pool: KVPool, *, num_rows: int, max_pages: int) -> None:
        self._spec, self._pool = spec, pool
        self.rows = DecodeRows(num_rows, max_pages, pool.padding_page, pool.device)
        self._words = torch.empty(0, dtype=torch.int64, device=pool.device)
        self._bucket = self._num_changes = 0
        self._late_changes: NDArray[np.int64] | None = None  # too many for the upload

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """None, or why a model cannot attend so."""
        if spec.exact:
            return "exact=True: decode would have other bits than prefill"
        if spec.kind != "mha" or spec.sparse:
            return f"kind={spec.kind}, sparse={spec.sparse}: no K and V planes that are read whole"
        return None if spec.layout == "nhd" else f"layout={spec.layout}"

    @property
    def max_words(self) -> int:
        """See `DecodeSource`."""
        return self.rows.num_rows + 8 + 2 * MAX_CHANGES

    def update(self, plan: StepPlan, bucket: int) -> tuple[Hashable, NDArray[np.int64]]:
        """See `DecodeSource`: the key is the number of pages that are read."""
        changes = self.rows.update(plan.request_ids, plan.batch.block_table)
        rows = np.full(bucket, self.rows.padding_row)
        rows[: len(changes.rows)] = changes.rows
        self._bucket, self._num_changes = bucket, len(changes.entries)
        words, self._late_changes = [rows, changes.entries, changes.pages], None
        if self._num_changes > MAX_CHANGES:
            self._late_changes, words = np.stack(words[1:]), words[:1]
        width = plan.batch.block_table.shape[1]
        num_pages = min(self.rows.max_pages, 1 << max(0, width - 1).bit_length())
        return num_pages, np.concatenate(words)

    def receive(self, words: Tensor) -> None:
        """See `DecodeSource`."""
        self._words = words[: self._bucket]
        if self._late_changes is not None:
            changes = to_device(self._late_changes, self._pool.device)
        else:
            changes = words[self._bucket :].view(2, self._num_changes)
        if self._num_changes:
            self.rows.table.view(-1).index_copy_(0, changes[0], changes[1])

    def attention(self, key: Hashable, positions: Tensor, slots: Tensor) -> Attention:
        """See `DecodeSource`."""
        assert isinstance(key, int)
        return DecodeAttention(
            self._spec,
            self._pool,
            table=self.rows.table,
            rows=self._words,
            positions=positions,
            slots=slots,
            num_pages=key,
        )

    def forget(self) -> None:
        """See `DecodeSource`."""
        self.rows.forget()


class BackendSource:
    """A backend whose plan has a `signature`: a graph holds for all plans with the same one."""

    def __init__(self, backend: PagedBackend, pool: KVPool) -> None:
        self._backend, self._pool = backend, pool
        self._attention: PagedAttention | None = None

    @property
    def max_words(self) -> int:
        """See `DecodeSource`."""
        return 0

    def update(self, plan: StepPlan, bucket: int) -> tuple[Hashable, NDArray[np.int64]]:
        """See `DecodeSource`: the backend uploads its plan by itself."""
        batch = padded_batch(plan.batch, bucket, self._pool.padding_page)
        slots = torch.empty(0, dtype=torch.int64)  # `attention` knows them
        self._attention = PagedAttention(self._backend, self._pool, batch, slots)
        signature: Hashable = self._attention.plan.signature
        return signature, np.empty(0, np.int64)

    def receive(self, words: Tensor) -> None:
        """See `DecodeSource`."""

    def attention(self, key: Hashable, positions: Tensor, slots: Tensor) -> Attention:
        """See `DecodeSource`."""
        assert self._attention is not None
        assert self._attention.plan.signature == key
        assert len(positions) == len(slots) == self._attention.batch.num_tokens
        self._attention.slots = slots
        return self._attention

    def forget(self) -> None:
        """See `DecodeSource`."""


def padded_batch(batch: AttentionBatch, num_rows: int, padding_page: int) -> AttentionBatch:
    """A decode batch with requests of one token in the padding page behind its own: `num_rows` in all."""
    count = num_rows - batch.num_seqs
    if not count:
        return batch
    zeros, ones = np.zeros(count, np.int32), np.ones(count, np.int32)
    table = np.full((count, batch.block_table.shape[1]), -1, np.int32)
    table[:, 0] = padding_page
    slots = np.full(count, padding_page * batch.page_size)
    return replace(
        batch,
        cu_seqlens_q=np.arange(num_rows + 1, dtype=np.int32),
        seq_lens_kv=np.concatenate([batch.seq_lens_kv, ones]),
        num_cached=np.concatenate([batch.num_cached, zeros]),
        block_table=np.concatenate([batch.block_table, table]),
        positions=np.concatenate([batch.positions, zeros]),
        slot_mapping=np.concatenate([batch.slot_mapping, slots]),
        shared_with=np.concatenate([batch.shared_with, -ones]),
        shared_len=np.concatenate([batch.shared_len, zeros]),
    )
