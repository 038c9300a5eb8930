"""The planner's state machine with forks, rollbacks and promises of room between the other steps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from ramify.attention.planner import RadixSequence
from ramify.errors import OutOfPagesError
from tests.pure.test_planner_machine import MAX_LIVE, MAX_TOKENS, PlannerMachine
from tests.pure.test_sequence_life import copy_pages

WHO = st.integers(0, 29)


class LifeMachine(PlannerMachine):
    """Sequences branch, go back and are asked for room; what holds is what holds for the others."""

    def committed(self) -> list[RadixSequence]:
        deferred = self.planner._awaiting_leader if hasattr(self, "planner") else []
        return [
            one
            for one in getattr(self, "live", ())
            if one.lease is not None and not one.num_planned and one not in deferred
        ]

    @precondition(lambda self: self.committed() and len(self.live) < MAX_LIVE)
    @rule(who=WHO, token=st.integers(1, 3))
    def fork(self, who: int, token: int) -> None:
        """The twin reads the same context; it goes on with a token of its own."""
        able = self.committed()
        one = able[who % len(able)]
        before = self.state()
        try:
            twin, pairs = self.planner.fork(one)
        except OutOfPagesError:
            assert self.state() == before
            return
        copy_pages(self.device, pairs)
        assert twin.tokens == one.tokens
        assert len(pairs) <= -(-one.num_computed // self.page_size)
        if len(twin.tokens) < MAX_TOKENS:
            twin.tokens.append(token + 9 * len(one.namespace))
        self.live.append(twin)

    @precondition(lambda self: self.committed())
    @rule(who=WHO, back=st.sampled_from([0, 1, 1, 2, 3, 5, 9, 99]), cut=st.booleans())
    def rollback(self, who: int, back: int, cut: bool) -> None:
        """The last tokens do not count; others come in their place, or they are computed again."""
        able = self.committed()
        one = able[who % len(able)]
        length = max(0, one.num_computed - back)
        self.planner.rollback(one, length)
        assert length - self.page_size < one.num_computed <= length
        if cut:
            del one.tokens[max(1, length) :]

    @precondition(lambda self: self.committed())
    @rule(who=WHO, num_tokens=st.sampled_from([1, 1, 2, 5, 9]))
    def go_on(self, who: int, num_tokens: int) -> None:
        """Room for more tokens is promised just when the step that computes them is planned."""
        able = self.committed()
        one = able[who % len(able)]
        if len(one.tokens) + num_tokens > MAX_TOKENS:
            return
        promised = self.planner.can_append(one, num_tokens)
        one.tokens.extend([2 + 9 * len(one.namespace)] * num_tokens)
        self.run_step([one], [one.num_uncomputed])
        assert promised == (one.num_planned > 0)

    @precondition(lambda self: any(one.lease is None for one in getattr(self, "live", ())))
    @rule(mask=st.integers(0, 127), turn=st.integers(0, 5))
    def begin(self, mask: int, turn: int) -> None:
        """Room for new sequences is promised just when they are planned."""
        chosen = self.choose([one for one in self.live if one.lease is None], mask, turn)
        promised = self.planner.can_allocate(chosen)
        self.run_step(chosen, [one.num_uncomputed for one in chosen])
        assert promised == all(one.num_planned for one in chosen)


def test_forks_and_rollbacks_give_no_wrong_answer_and_lose_no_page() -> None:
    """Between plans, commits, evictions and failures, in random order; promises are kept."""
    run_state_machine_as_test(
        LifeMachine, settings=settings(max_examples=80, stateful_step_count=40)
    )
