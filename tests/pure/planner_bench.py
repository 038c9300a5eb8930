"""A planner over a small pool and a fake device that sees every wrong page."""

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


def most_in_common(rows: Sequence[Sequence[int]], at: int, page_size: int) -> tuple[int, int]:
    """The first of the earlier rows that begins with most of the same pages; tokens in common."""
    best = (-1, 0)
    for other in range(at):
        run = takewhile(lambda pair: pair[0] == pair[1], zip(rows[at], rows[other], strict=False))
        common = sum(1 for _ in run) * page_size
        if common > best[1]:
            best = (other, common)
    return best


class Bench:
    """A planner over a small pool, and a fake device that sees every wrong page."""

    def __init__(
        self,
        num_pages: int = 16,
        page_size: int = 4,
        *,
        share: bool = True,
        num_rows: int = 8,
        cache_type: type[PrefixCache] = PrefixCache,
    ) -> None:
        self.cache = cache_type(num_pages, page_size)
        self.table = PagedBlockTable(num_rows, num_pages, page_size)
        self.planner = RadixAttentionPlanner(self.cache, self.table, share=share)
        self.device = FakeExecutor(num_pages, page_size, vocab_size=VOCAB)

    def plan(
        self, *sequences: RadixSequence, num_new: Sequence[int] | None = None
    ) -> AttentionBatch:
        batch = self.planner.plan(sequences, num_new)
        rows = [self.table.pages(one.row) for one in sequences if one.row is not None]
        assert list(zip(batch.shared_with.tolist(), batch.shared_len.tolist(), strict=True)) == [
            most_in_common(rows, at, self.table.page_size) for at in range(len(rows))
        ]
        return batch

    def execute(self, batch: AttentionBatch, *sequences: RadixSequence) -> list[int | None]:
        """Run the step; answers of the sequences whose last token was in it."""
        ids: list[int] = []
        draws = []
        for at, one in enumerate(sequences):
            end = one.num_computed + one.num_planned
            ids += one.tokens[one.num_computed : end]
            if end == len(one.tokens):
                row = int(batch.cu_seqlens_q[at + 1]) - 1
                draws.append(SampleSpec(at, row, end, SamplingParams(), 0, None))
        plan = StepPlan(
            batch, np.array(ids, np.int64), tuple(draws), (), tuple(range(batch.num_seqs))
        )
        drawn = self.device.execute(plan).sampled
        self.cache.check()
        return [drawn[at].token_ids[0] if at in drawn else None for at in range(len(sequences))]

    def run(self, *sequences: RadixSequence, num_new: Sequence[int] | None = None) -> list[Any]:
        """Plan, execute and commit; every answer must be that of the whole context."""
        answers = self.execute(self.plan(*sequences, num_new=num_new), *sequences)
        self.planner.commit(sequences)
        self.cache.check()
        for one, answer in zip(sequences, answers, strict=True):
            assert answer in (None, fake_next_token(one.tokens, VOCAB))
        return answers

    def warm(self, tokens: Iterable[int], namespace: bytes = b"") -> None:
        """Compute a prompt and leave it in the cache."""
        one = sequence_of(tokens, namespace)
        self.run(one)
        self.planner.release([one])

    def state(self) -> tuple[object, ...]:
        """All that a call which fails must leave as it was."""
        stats = self.cache.stats()
        held = (stats.free_pages, stats.private_pages, stats.cached_pages, stats.evictable_pages)
        counted = (stats.num_leases, stats.lookups, stats.lookup_tokens, stats.hit_tokens)
        rows = [self.table.pages(row) for row in range(self.table.array.shape[0])]
        return held, counted, stats.evicted_pages, rows, self.table.num_free_rows

    def assert_nothing_leaked(self) -> None:
        """With every sequence released, evicting gives all pages back."""
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


def pages_of(bench: Bench, one: RadixSequence) -> list[int]:
    assert one.row is not None
    return bench.table.pages(one.row)
