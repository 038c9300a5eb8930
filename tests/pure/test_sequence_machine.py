"""The planner's state machine with forks, rollbacks and capacity checks between the steps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from ramify.attention.planner import RadixSequence
from ramify.errors import OutOfPagesError
from tests.budget import examples
from tests.pure.planner_machine import MAX_LIVE, MAX_TOKENS
from tests.pure.test_planner_machine import RunAheadMachine
from tests.pure.test_sequence_life import copy_pages

WHO = st.integers(0, 29)


class LifeMachine(RunAheadMachine):
    """Adds fork, rollback, `can_append` and `can_allocate`; the same invariants hold."""

    def committed(self) -> list[RadixSequence]:
        awaiting_leader = self.planner._awaiting_leader if hasattr(self, "planner") else []
        return [
            sequence
            for sequence in getattr(self, "live", ())
            if sequence.lease is not None
            and not sequence.is_planned
            and sequence not in awaiting_leader
        ]

    @precondition(lambda self: self.committed() and len(self.live) < MAX_LIVE)
    @rule(who=WHO, token=st.integers(1, 3))
    def fork(self, who: int, token: int) -> None:
        """The branch has the same context; it continues with its own token."""
        able = self.committed()
        sequence = able[who % len(able)]
        before = self.state()
        try:
            branch, pairs = self.planner.fork(sequence)
        except OutOfPagesError:
            assert self.state() == before
            return
        copy_pages(self.device, pairs)
        assert branch.tokens == sequence.tokens
        assert len(pairs) <= -(-sequence.num_computed // self.page_size)
        if len(branch.tokens) < MAX_TOKENS:
            branch.tokens.append(token + 9 * len(sequence.namespace))
        self.live.append(branch)

    @precondition(lambda self: self.committed())
    @rule(who=WHO, back=st.sampled_from([0, 1, 1, 2, 3, 5, 9, 99]), cut=st.booleans())
    def rollback(self, who: int, back: int, cut: bool) -> None:
        """Drop the last tokens; others follow, or the same are computed again."""
        able = self.committed()
        sequence = able[who % len(able)]
        length = max(0, sequence.num_computed - back)
        assert sequence.lease is not None
        assert sequence.row is not None
        keep = length
        if length < sequence.lease.num_tokens:
            keep = length // self.page_size * self.page_size
        first = self.device.first_read(keep) // self.page_size
        in_window = self.table.pages(sequence.row)[first : -(-keep // self.page_size)]
        self.planner.rollback(sequence, length)
        assert sequence.num_computed == (0 if self.cache.num_pages in in_window else keep)
        if cut:
            del sequence.tokens[max(1, length) :]

    @precondition(lambda self: self.committed())
    @rule(who=WHO, num_tokens=st.sampled_from([1, 1, 2, 5, 9]))
    def go_on(self, who: int, num_tokens: int) -> None:
        """`can_append` is true exactly if the step that computes the tokens is planned."""
        able = self.committed()
        sequence = able[who % len(able)]
        if len(sequence.tokens) + num_tokens > MAX_TOKENS:
            return
        promised = self.planner.can_append(sequence, num_tokens)
        sequence.tokens.extend([2 + 9 * len(sequence.namespace)] * num_tokens)
        self.run_step([sequence], [sequence.num_uncomputed])
        assert promised == (sequence.num_planned > 0)

    @precondition(
        lambda self: any(sequence.lease is None for sequence in getattr(self, "live", ()))
    )
    @rule(mask=st.integers(0, 127), turn=st.integers(0, 5))
    def begin(self, mask: int, turn: int) -> None:
        """`can_allocate` is true exactly if the sequences are planned."""
        chosen = self.choose(
            [sequence for sequence in self.live if sequence.lease is None], mask, turn
        )
        promised = self.planner.can_allocate(chosen)
        self.run_step(chosen, [sequence.num_uncomputed for sequence in chosen])
        assert promised == all(sequence.num_planned for sequence in chosen)


def test_forks_and_rollbacks_give_no_wrong_answer_and_lose_no_page() -> None:
    """Between plans, commits, evictions and failures, in random order."""
    run_state_machine_as_test(
        LifeMachine, settings=settings(max_examples=examples(80), stateful_step_count=40)
    )
