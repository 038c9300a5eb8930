"""Sequences forked, rolled back and resumed by the planner have the bits of a cold run each.

Branches share pages, go on with tokens of their own in one batch, have drafts rejected, and run out
of room. After every step the logits of all its rows, and all K/V of every branch, have the bits of
a cold run of that branch's tokens.
"""

from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.planner import RadixAttentionPlanner, RadixSequence
from ramify.cache.prefix_cache import PrefixCache
from ramify.engine.step import StepPlan
from ramify.errors import OutOfPagesError
from ramify.kv.block_table import PagedBlockTable
from tests.budget import examples
from tests.cpu.attention_mutants import ForgottenCopies
from tests.cpu.bit_scenarios import LONG, SHORT, tokens
from tests.cpu.engine_cases import (
    Model,
    Prompt,
    RecordingRunner,
    Reference,
    cold,
    kv_bits,
    spoil_free_pages,
)

EXAMPLES = examples(16)
MAX_BRANCHES, MAX_DRAFTS, TAIL = 4, 6, 9
MODELS = [
    ("llama", "float32"),
    ("llama", "float32-torch"),
    ("llama", "bfloat16-int8"),
    ("mistral", "bfloat16"),
    ("qwen3", "float32-weights4"),
    ("qwen3", "float32-weights8-rows8"),
    ("qwen3", "bfloat16-gguf"),
    ("qwen3", "float32-fp8"),
    ("v2", "float32-int8"),
    ("v32", "bfloat16"),
]


@dataclass(frozen=True)
class Round:
    """An action on one branch, followed by a step of all branches that have tokens to compute."""

    action: str
    who: int
    length: int  # of a new prompt, or what is kept of a branch
    chunk: int
    drafts: tuple[int, ...]  # for each branch that has nothing left to compute
    rejected: int = 0  # of each branch's drafts, at most


@dataclass
class Branches:
    """Live sequences over one pool, and the logits and K/V that their steps computed."""

    model: Model
    page_size: int
    num_pages: int
    live: list[RadixSequence] = field(default_factory=list)
    seen: list[tuple[Prompt, Tensor, Tensor]] = field(default_factory=list)  # tokens, logits, K/V
    num_copied: int = 0  # pages

    def __post_init__(self) -> None:
        self.runner = RecordingRunner(self.model, self.num_pages, self.page_size)
        self.cache = PrefixCache(self.num_pages, self.page_size)
        table = PagedBlockTable(MAX_BRANCHES, self.num_pages, self.page_size)
        self.planner = RadixAttentionPlanner(self.cache, table)

    def play(self, number: int, now: Round) -> None:
        """Run one round; if pages run out, drop the youngest branch."""
        if len(self.live) == MAX_BRANCHES and now.action in ("begin", "nest", "fork"):
            self.planner.release([self.live.pop(now.who % MAX_BRANCHES)])
        if now.action == "begin" or not self.live:
            self.live.append(RadixSequence(array("i", tokens(now.who % 2, now.length))))
        sequence = self.live[now.who % len(self.live)]
        if now.action == "nest":
            self.live.append(RadixSequence(sequence.tokens + array("i", tokens(number, TAIL))))
        elif now.action == "resume":
            self.planner.release([sequence])
            self.live[self.live.index(sequence)] = RadixSequence(sequence.tokens)
        elif now.action == "fork" and sequence.lease is not None:
            with suppress(OutOfPagesError):
                twin, copies = self.planner.fork(sequence)
                self.runner.pool.copy_pages(*zip(*copies, strict=True) if copies else ((), ()))
                self.live.append(twin)
                self.num_copied += len(copies)
        elif now.action == "rollback" and sequence.num_computed:
            kept = 1 + now.length % sequence.num_computed
            self.planner.rollback(sequence, kept)
            del sequence.tokens[kept:]
        self._step(number, now)

    def _step(self, number: int, now: Round) -> None:
        drafting = [sequence for sequence in self.live if not sequence.num_uncomputed]
        for index, sequence in enumerate(drafting):
            sequence.tokens.extend(tokens(100 * number + index % 3, now.drafts[index]))
        # others could attach to drafts that are then rejected
        rejected = 0 if any(sequence.lease is None for sequence in self.live) else now.rejected
        going, batch = self._plan(drafting, now.chunk)
        ends = [sequence.num_computed + sequence.num_planned for sequence in going]
        spans = [
            sequence.tokens[sequence.num_computed : end]
            for sequence, end in zip(going, ends, strict=True)
        ]
        spoil_free_pages(self.runner.pool, self.cache)
        ids = np.array([token for span in spans for token in span], np.int64)
        hidden = self.runner.forward(StepPlan(batch, ids, (), (), tuple(range(len(going)))))
        logits = self.runner.logits(hidden, range(len(ids))).view(torch.int32)
        for i, (sequence, end) in enumerate(zip(going, ends, strict=True)):
            rows = logits[batch.cu_seqlens_q[i] : batch.cu_seqlens_q[i + 1]]
            kv = kv_bits(self.runner.pool, torch.from_numpy(batch.kv_slots(i)))
            self.seen.append((tuple(sequence.tokens[:end]), rows, kv))
        planned = [
            (sequence.num_planned, rejected if sequence in drafting else 0) for sequence in going
        ]
        self.planner.commit(going, [max(0, count - lost) for count, lost in planned])
        for sequence in drafting:
            del sequence.tokens[sequence.num_computed :]
        self.cache.check()

    def _plan(
        self, drafting: list[RadixSequence], chunk: int
    ) -> tuple[list[RadixSequence], AttentionBatch]:
        going = [sequence for sequence in self.live if sequence.num_uncomputed]
        chunks = [MAX_DRAFTS if sequence in drafting else chunk for sequence in going]
        try:
            return going, self.planner.plan(going, chunks)
        except OutOfPagesError:
            self.planner.release([self.live.pop()])
            return self._plan(drafting, chunk)

    def differences(self) -> list[str]:
        """List the logits and K/V that differ from a cold run of the same tokens."""
        mismatches: list[str] = []
        runs: dict[Prompt, Reference] = {}
        for own, logits, kv in sorted(self.seen, key=lambda step: -len(step[0])):
            end = len(own)
            whole = next((known for known in runs if known[:end] == own), own)
            if whole not in runs:
                runs[whole] = cold(self.model, whole)
            alone = runs[whole]
            if not torch.equal(logits, alone.logits[end - len(logits) : end]):
                mismatches.append(f"logits of a step up to token {end}")
            if not torch.equal(kv, alone.kv[:end]):
                mismatches.append(f"K/V of {end} tokens")
        return mismatches


def play(model: Model, page_size: int, spare_pages: int, rounds: list[Round]) -> Branches:
    """Run all rounds; the pool has `spare_pages` more pages than the longest sequence needs."""
    longest = max(round_.length for round_ in rounds)
    longest += sum(max(round_.drafts) + TAIL * (round_.action == "nest") for round_ in rounds)
    branches = Branches(model, page_size, -(-longest // page_size) + spare_pages)
    for number, round_ in enumerate(rounds, 1):
        branches.play(number, round_)
    return branches


ROUNDS = st.builds(
    Round,
    action=st.sampled_from(["begin", "nest", "fork", "fork", "rollback", "resume", "go on"]),
    who=st.integers(0, 3),
    length=st.one_of(SHORT, SHORT, LONG),
    chunk=st.one_of(st.integers(5, 60), st.just(400)),
    drafts=st.tuples(*[st.integers(0, MAX_DRAFTS)] * MAX_BRANCHES),
    rejected=st.integers(0, 3),
)


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_every_branch_is_as_if_it_were_alone(
    family: str, variant: str, model_of: Callable[[str, str], Model]
) -> None:
    """Forks, partly accepted drafts, rollback and preemption keep the bits of a cold run."""
    model, num_cases = model_of(family, variant), 0

    @settings(max_examples=EXAMPLES)
    @given(
        st.sampled_from([1, 2, 3, 5, 16, 64]),
        st.integers(0, 8),
        st.lists(ROUNDS, min_size=3, max_size=12),
    )
    def check(page_size: int, spare_pages: int, rounds: list[Round]) -> None:
        nonlocal num_cases
        num_cases += 1

        assert play(model, page_size, spare_pages, rounds).differences() == []

    check()

    assert num_cases >= EXAMPLES


FORKED = [
    Round("begin", 0, 265, 100, (0,) * 4),
    Round("fork", 0, 0, 100, (0,) * 4),  # while its prompt is computed
    Round("go on", 0, 0, 100, (0,) * 4),
    Round("fork", 0, 0, 100, (1, 1, 1, 0)),
    Round("fork", 1, 0, 100, (3, 2, 6, 4), rejected=2),
    Round("rollback", 0, 257, 100, (5, 0, 1, 1)),
    Round("rollback", 1, 100, 7, (2, 2, 2, 2), rejected=1),
    Round("resume", 2, 0, 100, (6, 6, 6, 6)),
    Round("fork", 3, 0, 100, (1, 2, 3, 4)),
    Round("begin", 1, 200, 100, (1, 1, 1, 1)),
]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_forks_behind_one_prompt(page_size: int, model_of: Callable[[str, str], Model]) -> None:
    """A fixed sequence of forks copies partial pages wherever pages hold more than one token."""
    branches = play(model_of("llama", "float32"), page_size, 10, FORKED)

    assert branches.differences() == []
    assert (branches.num_copied > 0) == (page_size > 1)
    assert len(branches.seen) > 20


def test_a_forgotten_copy_is_found(model_of: Callable[[str, str], Model]) -> None:
    """A fork that does not copy its parent's partial page is detected."""
    model = model_of("llama", "float32").with_fault(pool=ForgottenCopies)

    assert play(model, 16, 10, FORKED).differences()
