"""The planner's state machine, running ahead: no order of calls gives a wrong token or loses a page."""

from array import array

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from ramify.attention.planner import RadixSequence
from ramify.engine.step import SampleSpec, StepPlan
from ramify.errors import OutOfPagesError
from ramify.params import SamplingParams
from ramify.testing import fake_next_token
from tests.budget import examples
from tests.pure.planner_machine import MASKS, MAX_TOKENS, TURNS, VOCAB, PlannerMachine


class RunAheadMachine(PlannerMachine):
    """Adds second plans behind plans that are committed later, or never; the same invariants hold."""

    def may_run_ahead(self, sequence: RadixSequence) -> bool:
        """Whether its next token is known, or what the step in flight samples."""
        end = sequence.num_computed + sequence.num_planned
        return (
            sequence.lease is not None
            and not sequence.num_ahead
            and end < MAX_TOKENS
            and (len(sequence.tokens) > end or sequence.num_planned > 0)
        )

    @precondition(lambda self: any(map(self.may_run_ahead, self.live)))
    @rule(mask=MASKS, turn=TURNS)
    def run_ahead(self, mask: int, turn: int) -> None:
        """Some sequences get a second plan; the one before is committed later, or never."""
        able = [sequence for sequence in self.live if self.may_run_ahead(sequence)]
        self.begin_ahead(self.choose(able, mask, turn), 1 + mask % 7)

    @precondition(lambda self: any(not sequence.is_planned for sequence in self.live))
    @rule(mask=MASKS, turn=TURNS, num_steps=st.integers(1, 9), ends_at=st.integers(0, 9))
    def decode_ahead(self, mask: int, turn: int, num_steps: int, ends_at: int) -> None:
        """Each step is planned before the one in front is committed; the last stays in flight.

        Prompts are computed in chunks.
        """
        able = [s for s in self.live if not s.is_planned and len(s.tokens) < MAX_TOKENS]
        chosen = self.choose(able, mask, turn)
        for sequence in chosen:
            if not sequence.num_uncomputed:
                sequence.tokens.append(1 + 9 * len(sequence.namespace))
        limit = 1 + mask % 7
        self.run_step(chosen, [min(limit, sequence.num_uncomputed) for sequence in chosen])
        for step in range(num_steps):
            self.begin_ahead(chosen, limit)
            in_front = [sequence for sequence in chosen if sequence.num_planned]
            self.end_step(in_front, num_ending=int(step == ends_at))
            chosen = [s for s in chosen if s in self.live and s.num_planned]

    def begin_ahead(self, sequences: list[RadixSequence], limit: int) -> None:
        """Plan and execute up to `limit` more tokens of the sequences that may run ahead.

        Drawn tokens are those of the whole context, as without running ahead.
        """
        chosen = [sequence for sequence in sequences if self.may_run_ahead(sequence)]
        if not chosen:
            return
        ends = [sequence.num_computed + sequence.num_planned for sequence in chosen]
        counts = [
            max(1, min(limit, len(sequence.tokens) - end))
            for sequence, end in zip(chosen, ends, strict=True)
        ]
        before = self.state()
        try:
            batch = self.planner.ahead.plan(chosen, counts)
        except OutOfPagesError:
            assert self.state() == before
            return
        self.assert_built_anew(batch, chosen, [*zip(ends, counts, strict=True)])
        ids: list[int] = []
        contexts: list[array[int]] = []
        for sequence, end, count in zip(chosen, ends, counts, strict=True):
            context = sequence.tokens[: end + count]
            if end == len(context):
                self.late[sequence] = 1 + 9 * len(sequence.namespace)
                context.append(self.late[sequence])
            ids += context[end:]
            contexts.append(context)
        samples = [
            SampleSpec(
                row, int(batch.cu_seqlens_q[row + 1]) - 1, len(tokens), SamplingParams(), 0, None
            )
            for row, tokens in enumerate(contexts)
        ]
        result = self.device.execute(
            StepPlan(
                batch, np.array(ids, np.int64), tuple(samples), (), tuple(range(batch.num_seqs))
            )
        )
        for row, tokens in enumerate(contexts):
            assert result.sampled[row].token_ids == (fake_next_token(tokens, VOCAB),)

    def end_step(
        self, sequences: list[RadixSequence], kept: list[int] | None = None, *, num_ending: int = 0
    ) -> None:
        """Commit plans; what runs ahead of these, or of nothing, is the plan in flight then.

        Args:
            num_ending: sequences that end with the token that they sample, of those running ahead.
        """
        self.planner.commit(sequences, kept)
        self.promoted.difference_update(sequences)
        ahead = [s for s in self.live if s.num_ahead and not s.num_planned]
        for sequence in ahead:
            if sequence in self.late:
                sequence.tokens.append(self.late.pop(sequence))
        self.leave(ahead[:num_ending])
        going_on = [sequence for sequence in ahead[num_ending:] if sequence.num_ahead]
        self.planner.ahead.promote(going_on)
        self.promoted.update(going_on)

    @precondition(lambda self: any(sequence.num_ahead for sequence in self.live))
    @rule(mask=MASKS)
    def cancel_ahead(self, mask: int) -> None:
        """A second step that was not begun; the first is as it was."""
        ahead = [sequence for sequence in self.live if sequence.num_ahead]
        for sequence in self.choose(ahead, mask, 0):
            self.planner.ahead.cancel([sequence])
            self.late.pop(sequence, None)

    @precondition(lambda self: self.promoted.intersection(self.live))
    @rule(mask=MASKS)
    def drop_step(self, mask: int) -> None:
        """The step in flight, which was planned ahead, is waited for and planned again."""
        able = [s for s in self.live if s in self.promoted and s.num_planned and not s.num_ahead]
        self.planner.ahead.undo(self.choose(able, mask, 0))
        self.promoted.difference_update(able)


def test_no_order_of_calls_gives_a_wrong_answer_or_loses_a_page() -> None:
    """Plan, commit, abandon, append, release and evict in random order; see the invariants."""
    run_state_machine_as_test(
        RunAheadMachine, settings=settings(max_examples=examples(400), stateful_step_count=50)
    )
