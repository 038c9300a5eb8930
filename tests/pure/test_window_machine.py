"""The planner's state machine where every layer has a window: pages before it go when pages run out."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from tests.budget import examples
from tests.pure.planner_machine import MASKS, TURNS
from tests.pure.test_sequence_machine import LifeMachine


class WindowMachine(LifeMachine):
    """Long prompts in small pools, in chunks; the same invariants hold, within each window."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4]),
        num_pages=st.integers(1, 12),
        share=st.sampled_from([True, True, True, False]),
        window=st.integers(2, 14),
        partial_pages=st.booleans(),
        evicts_before_copies=st.booleans(),
    )
    def make(
        self,
        page_size: int,
        num_pages: int,
        share: bool,
        window: int | None,
        partial_pages: bool,
        evicts_before_copies: bool,
    ) -> None:
        """The pool has `num_pages` pages more than a window."""
        assert window is not None
        num_pages += -(-window // page_size)
        super().make(page_size, num_pages, share, window, partial_pages, evicts_before_copies)

    @rule(
        stem=st.sampled_from(["aaaaaaaaaaaa", "aaaaaaab", "aaaaaaaaaaaaaaaaaab"]),
        tail=st.integers(0, 3),
    )
    def a_long_prompt_arrives(self, stem: str, tail: int) -> None:
        self.arrive(stem, tail, b"", [True])

    @rule(mask=MASKS, turn=TURNS, limit=st.integers(1, 6), num_steps=st.integers(1, 8))
    def chunks(self, mask: int, turn: int, limit: int, num_steps: int) -> None:
        """Compute some sequences in chunks, as far as the pages reach."""
        for _ in range(num_steps):
            able = [s for s in self.live if s.num_uncomputed and not s.is_planned]
            chosen = self.choose(able, mask, turn)[:2]
            self.run_step(chosen, [min(limit, s.num_uncomputed) for s in chosen])
            planned = [s for s in chosen if s.num_planned]
            if not planned:
                return
            self.end_step(planned)


def test_released_pages_are_never_read_and_never_lost() -> None:
    """Chunks, decodes, forks, rollbacks and failures while pages before the windows are freed."""
    run_state_machine_as_test(
        WindowMachine, settings=settings(max_examples=examples(200), stateful_step_count=40)
    )
