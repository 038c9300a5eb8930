"""Metadata of a planned step, built from that of the step before where the same requests go on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ramify.attention.batch import AttentionBatch, sharing_arrays
from ramify.attention.sequence import RadixSequence
from ramify.cache.prefix_cache import PrefixCache
from ramify.kv.block_table import PagedBlockTable


class BatchReuse:
    """Builds the `AttentionBatch` of each step; keeps rows and page sharing of the last."""

    def __init__(self, cache: PrefixCache, table: PagedBlockTable) -> None:
        self._cache, self._table = cache, table
        self._sequences: list[RadixSequence] = []  # of the last step; empty: reuse nothing of it
        self._rows = np.empty(0, np.int64)
        self._sharing = sharing_arrays((), 0)
        self._decode: AttentionBatch | None = None  # the last batch, if all rows were decodes

    def forget(self) -> None:
        """Compute rows and page sharing anew: those of the last step may have changed."""
        self._sequences = []

    def build(self, sequences: Sequence[RadixSequence], *, num_decodes: int) -> AttentionBatch:
        """The metadata of planned sequences, of which `num_decodes` are plain decodes."""
        cached = [sequence.num_computed for sequence in sequences]
        if num_decodes == len(sequences) > 0:
            return self._build_decodes(sequences, cached)
        self._update(sequences)
        self._decode = None
        new = [sequence.num_planned for sequence in sequences]
        return AttentionBatch.from_rows(self._rows, cached, new, self._table, self._sharing)

    def build_ahead(
        self, sequences: Sequence[RadixSequence], begins: list[int], counts: Sequence[int]
    ) -> AttentionBatch:
        """The metadata of `counts` tokens of each sequence, at least one, from `begins` on."""
        if len(counts) == sum(counts) > 0:
            return self._build_decodes(sequences, begins)
        self._update(sequences)
        self._decode = None
        return AttentionBatch.from_rows(self._rows, begins, counts, self._table, self._sharing)

    def _build_decodes(
        self, sequences: Sequence[RadixSequence], cached: list[int]
    ) -> AttentionBatch:
        self._update(sequences)
        before = self._decode
        if before is not None and before.seq_lens_kv.tolist() == cached:
            batch = before.next_decode(self._rows, self._table)
        else:
            batch = AttentionBatch.from_decodes(self._rows, cached, self._table, self._sharing)
        self._decode = batch
        return batch

    def _update(self, sequences: Sequence[RadixSequence]) -> None:
        """Take rows and page sharing of these sequences, unless they are those of the last step."""
        if not sequences or self._sequences != list(sequences):
            leases = [sequence.lease for sequence in sequences if sequence.lease is not None]
            self._sharing = sharing_arrays(self._cache.sharing(leases), len(sequences))
            self._rows = np.array([sequence.row for sequence in sequences], np.int64)
            self._sequences, self._decode = list(sequences), None
