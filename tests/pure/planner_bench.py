"""A planner over a small pool, and a fake device that detects every wrong page."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache import PrefixCache
from ramify.engine.step import SampleSpec, StepPlan
from ramify.kv.block_table import PagedBlockTable
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor, fake_next_token

VOCAB = 1000


def most_in_common(rows: Sequence[Sequence[int]], index: int, page_size: int) -> tuple[int, int]:
    """(earlier row that shares most leading pages with row `index`, or -1; tokens shared)."""
    best = (-1, 0)
    for other in range(index):
        run = takewhile(
            lambda pair: pair[0] == pair[1], zip(rows[index], rows[other], strict=False)
        )
        common = sum(1 for _ in run) * page_size
        if common > best[1]:
            best = (other, common)
    return best


class Bench:
    """A planner over a small pool, and a fake device that detects every wrong page."""

    def __init__(
        self,
        num_pages: int = 16,
        page_size: int = 4,
        *,
        share: bool = True,
        num_rows: int = 8,
        cache_type: type[PrefixCache] = PrefixCache,
        partial_pages: bool = False,
        window: int | None = None,
    ) -> None:
        self.cache = cache_type(num_pages, page_size, window=window)
        self.table = PagedBlockTable(num_rows, num_pages, page_size)
        self.planner = RadixAttentionPlanner(
            self.cache, self.table, share=share, partial_pages=partial_pages
        )
        self.device = FakeExecutor(num_pages, page_size, vocab_size=VOCAB, window=window)

    def plan(
        self, *sequences: RadixSequence, num_new: Sequence[int] | None = None
    ) -> AttentionBatch:
        batch = self.planner.plan(sequences, num_new)
        rows = [
            self.table.pages(sequence.row) for sequence in sequences if sequence.row is not None
        ]
        assert list(zip(batch.shared_with.tolist(), batch.shared_len.tolist(), strict=True)) == [
            most_in_common(rows, index, self.table.page_size) for index in range(len(rows))
        ]
        return batch

    def execute(self, batch: AttentionBatch, *sequences: RadixSequence) -> list[int | None]:
        """Run the step; returns the drawn token of each sequence whose last token was in it."""
        self.device.copy_pages([(copy.source, copy.target) for copy in batch.page_copies])
        ids: list[int] = []
        draws = []
        for index, sequence in enumerate(sequences):
            end = sequence.num_computed + sequence.num_planned
            ids += sequence.tokens[sequence.num_computed : end]
            if end == len(sequence.tokens):
                row = int(batch.cu_seqlens_q[index + 1]) - 1
                draws.append(SampleSpec(index, row, end, SamplingParams(), 0, None))
        plan = StepPlan(
            batch, np.array(ids, np.int64), tuple(draws), (), tuple(range(batch.num_seqs))
        )
        drawn = self.device.execute(plan).sampled
        self.cache.check()
        return [
            drawn[index].token_ids[0] if index in drawn else None for index in range(len(sequences))
        ]

    def run(self, *sequences: RadixSequence, num_new: Sequence[int] | None = None) -> list[Any]:
        """Plan, execute and commit; every drawn token must be that of the whole context."""
        answers = self.execute(self.plan(*sequences, num_new=num_new), *sequences)
        self.planner.commit(sequences)
        self.cache.check()
        for sequence, answer in zip(sequences, answers, strict=True):
            assert answer in (None, fake_next_token(sequence.tokens, VOCAB))
        return answers

    def warm(self, tokens: Iterable[int], namespace: bytes = b"") -> None:
        """Compute a prompt and release it: it stays in the cache."""
        sequence = sequence_of(tokens, namespace)
        self.run(sequence)
        self.planner.release([sequence])

    def state(self) -> tuple[object, ...]:
        """All that a failed call must leave unchanged."""
        stats = self.cache.stats()
        held = (stats.free_pages, stats.private_pages, stats.cached_pages, stats.evictable_pages)
        counted = (stats.num_leases, stats.lookups, stats.lookup_tokens, stats.hit_tokens)
        rows = [self.table.pages(row) for row in range(self.table.array.shape[0])]
        return held, counted, stats.evicted_pages, rows, self.table.num_free_rows

    def assert_nothing_leaked(self) -> None:
        """With every sequence released, clearing the cache frees all pages."""
        self.cache.check()
        assert self.cache.stats().num_leases == 0
        assert self.cache.stats().private_pages == 0
        assert self.table.num_free_rows == self.table.array.shape[0]
        self.cache.clear()
        assert self.cache.stats().free_pages == self.cache.num_pages
        self.cache.check()


def sequence_of(
    tokens: Iterable[int], namespace: bytes = b"", *, reuse: bool = True
) -> RadixSequence:
    return RadixSequence(array("i", tokens), namespace, reuse)


def pages_of(bench: Bench, sequence: RadixSequence) -> list[int]:
    assert sequence.row is not None
    return bench.table.pages(sequence.row)
