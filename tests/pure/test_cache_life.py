"""A short run of the state machine that `make soak-core` runs a million operations of."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from ramify.cache import INDICES
from tests.budget import examples
from tests.pure.cache_life import LifeMachine


@pytest.mark.parametrize("index", INDICES)
def test_random_lives_break_no_invariant(index: str) -> None:
    """Forks, drafts, pins and predicates, under all policies."""
    machine = type(f"{index.title()}Machine", (LifeMachine,), {"indices": (index,)})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None),
    )
