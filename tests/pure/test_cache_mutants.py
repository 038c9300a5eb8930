"""The state machine of the cache core finds the faults that it is there to find."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ramify.cache import PrefixCache
from ramify.errors import CacheError
from tests.budget import examples
from tests.pure.cache_mutants import MUTANTS
from tests.pure.test_cache_machine import CacheMachine

# Shrinking is for people; the same examples on every run, or a fault that is found one time in a
# thousand would pass unseen the other times.
QUICK = settings(
    max_examples=examples(300),
    stateful_step_count=40,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


# A search ends with the first finding, so only a fault that stays hidden takes them all. Which example is
# the first differs by version of Hypothesis: the rarest fault here takes 100 on average.
SEARCH = settings(QUICK, max_examples=examples(2000))

# What the model expects to be refused is caught where it happens; any other error is a finding.
FOUND = (AssertionError, CacheError)


def machine_for(cache_type: type[PrefixCache]) -> type[CacheMachine]:
    return type(cache_type.__name__, (CacheMachine,), {"cache_type": cache_type})


def without_check(cache_type: type[PrefixCache]) -> type[PrefixCache]:
    """The same cache, blind to its own faults."""
    return type("Blind" + cache_type.__name__, (cache_type,), {"check": lambda self: None})


CASES = [
    pytest.param(mutant, id=f"{fault}: {mutant.__name__}")
    for fault, mutants in MUTANTS.items()
    for mutant in mutants
]


@pytest.mark.parametrize("mutant", CASES)
def test_the_state_machine_finds_the_fault(mutant: type[PrefixCache]) -> None:
    """A cache with this fault breaks an invariant, or does what the model does not."""
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine_for(mutant), settings=SEARCH)


@pytest.mark.parametrize("mutant", CASES)
def test_the_model_finds_the_fault_without_check(mutant: type[PrefixCache]) -> None:
    """The model does not rely on `check()`, which might share the fault."""
    with pytest.raises(FOUND):
        run_state_machine_as_test(machine_for(without_check(mutant)), settings=SEARCH)


def test_the_cache_itself_passes_with_the_same_settings() -> None:
    """What finds the faults finds none in the cache as it is."""
    run_state_machine_as_test(machine_for(PrefixCache), settings=QUICK)
