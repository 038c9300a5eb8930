"""Where every layer has a window, requests longer than the pool are served, bit by bit as alone."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.config import live_pages
from ramify.models.kv_cache_spec import longest_window
from tests.cpu.bit_scenarios import AGAIN, FIRST, TURNS, Scenario, Turn, compare
from tests.cpu.engine_cases import Model, Sizes

# pools with room for little more than a window and a step: pages are released, requests preempted
TIGHT = st.builds(
    Scenario,
    sizes=st.builds(
        Sizes,
        page_size=st.sampled_from([1, 2, 3, 5, 16]),
        num_pages=st.integers(0, 12),
        max_batch_tokens=st.integers(4, 40),
        max_num_seqs=st.integers(1, 5),
        prefix_cache=st.sampled_from([True, True, True, False]),
    ),
    turns=st.lists(TURNS, min_size=2, max_size=3).map(tuple),
)
VARIANTS = ["float32", "bfloat16", "float32-blocked", "bfloat16-int8", "float32-torch"]


def least_pages(model: Model, sizes: Sizes) -> int:
    """Pages that the window and a step need."""
    window = longest_window(model.decoder.config)
    return live_pages(1 << 20, sizes.page_size, window, sizes.max_batch_tokens)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ab21_released_pages_change_no_bit(
    variant: str, model_of: Callable[[str, str], Model]
) -> None:
    """Any turns over a pool of little more than a window and a step: all bits are those alone."""
    model, num_released = model_of("mistral", variant), 0

    @settings(max_examples=8)
    @given(TIGHT)
    def check(scenario: Scenario) -> None:
        nonlocal num_released

        outcome = compare(model, scenario, least_pages=least_pages(model, scenario.sizes))

        num_released += outcome.released_pages
        assert outcome.differences == []

    check()

    assert num_released > 0


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_prompt_longer_than_the_pool_is_answered_and_continued(
    page_size: int, model_of: Callable[[str, str], Model]
) -> None:
    """Prompts of several windows, their answers continued, in a pool of a window and a step."""
    model = model_of("mistral", "bfloat16")
    sizes = Sizes(page_size=page_size, num_pages=1, max_batch_tokens=32, max_num_seqs=4)

    outcome = compare(
        model, Scenario(sizes, (Turn(FIRST), Turn(AGAIN))), least_pages=least_pages(model, sizes)
    )

    assert outcome.differences == []
    assert outcome.released_pages > 0
    assert outcome.read_tokens > 0
