"""exact=True: whatever was cached, chunked, batched or preempted, every logit has the same bits.

A scenario is a sequence of turns; each turn asks several things at once of an engine of random
sizes, over pages that hold NaN when they are handed out. All rows of logits that tokens are drawn
from, and all K/V that is left in the cache, are compared as integers with those of the same prompt
alone: cold, in one chunk, without a cache, each on a fresh engine; the K/V of tokens that were
decoded is compared with that of a prompt of the same tokens.

The same comparison finds the faults that would break this: see `test_bit_faults`; sequences that
are forked and rolled back: see `test_bit_forks`.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.budget import examples
from tests.cpu.bit_scenarios import (
    AGAIN,
    FIRST,
    SCENARIOS,
    Ask,
    Scenario,
    Turn,
    compare,
)
from tests.cpu.engine_cases import Model, Sizes
from tests.cpu.tiny_models import DENSE, LATENT

MODELS = [
    *((family, "float32-onednn") for family in DENSE),
    ("llama", "float32-padded"),
    ("qwen3", "float32-padded"),
    *((family, "bfloat16-torch") for family in DENSE),
    ("llama", "float32-torch-blocked"),
    ("qwen2", "bfloat16-onednn"),
    ("v2", "float32-onednn"),
    ("v2", "bfloat16-torch"),
    ("v32", "bfloat16-onednn"),
    *((family, "bfloat16") for family in DENSE),
    ("llama", "float32"),
    ("llama", "float32-blocked"),
    ("mistral", "float32-blocked"),
    ("llama", "bfloat16-padded"),
    ("llama", "float32-int8"),
    ("mistral", "bfloat16-int8"),
    ("qwen2", "bfloat16-int8"),
    ("qwen3", "float32-int8"),
    ("llama", "bfloat16-fp8"),
    ("mistral", "float32-fp8"),
    ("llama", "float32-weights4"),
    ("qwen3", "float32-weights8"),
    ("qwen3", "bfloat16-weights4-int8"),
    ("llama", "bfloat16-weights8-rows8"),
    ("qwen3", "float32-weights4-rows8"),
    ("qwen3", "float32-gguf"),
    ("qwen3", "float32-gguf-torch"),
    *((family, dtype) for family in LATENT for dtype in ("float32", "bfloat16", "float32-int8")),
    ("v2", "bfloat16-fp8"),
    ("v32", "bfloat16-int8"),
]
NUM_CASES = 600  # random scenarios of a full run, at least
EXAMPLES = examples(-(-NUM_CASES // len(MODELS)))


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_logits_never_depend_on_the_cache(
    family: str, variant: str, model_of: Callable[[str, str], Model]
) -> None:
    """Any turns over any pool, page size, chunk and batch: bit by bit the logits of each alone."""
    model, num_cases = model_of(family, variant), 0

    @settings(max_examples=EXAMPLES)
    @given(SCENARIOS)
    def check(scenario: Scenario) -> None:
        nonlocal num_cases
        num_cases += 1

        assert compare(model, scenario).differences == []

    check()

    assert num_cases >= EXAMPLES


PRESSED_MODELS = [
    ("llama", "float32-torch"),
    ("llama", "bfloat16-torch"),
    ("llama", "float32-padded"),
    ("llama", "float32-blocked"),
    ("llama", "bfloat16"),
    ("llama", "bfloat16-padded"),
    ("llama", "bfloat16-int8"),
    ("v2", "float32-int8"),
]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("family", "variant"), PRESSED_MODELS)
def test_warm_chunked_batched_and_preempted_at_once(
    family: str, variant: str, page_size: int, model_of: Callable[[str, str], Model]
) -> None:
    """Warm and partly warm prefixes beyond one key block, answers continued, a pool that is full.

    Unlike the random scenarios, this one is known to share, to read, to evict and to preempt.
    """
    model = model_of(family, variant)
    turns = (Turn(FIRST), Turn(AGAIN), Turn(FIRST, clear=True), Turn(AGAIN))
    roomy = Sizes(page_size=page_size, num_pages=11500 // page_size, max_batch_tokens=400)
    tight = replace(roomy, num_pages=60 // page_size, max_batch_tokens=65)

    at_ease = compare(model, Scenario(roomy, turns))
    pressed = compare(model, Scenario(tight, (*turns, Turn(crowd()))))

    assert at_ease.differences == pressed.differences == []
    assert at_ease.num_rows == 80
    assert at_ease.read_tokens > 0
    assert at_ease.shared_tokens > 0
    assert pressed.evicted_pages > 0
    assert pressed.preemptions > 0


def crowd() -> tuple[Ask, ...]:
    """Requests that fit the pool when they start and not when they have grown."""
    return tuple(Ask(20 + i, 60, i, 1, 60) for i in range(6))


def test_warm_prompts_that_pin_most_of_the_pool_take_turns(
    model_of: Callable[[str, str], Model],
) -> None:
    """Two prompts whose prefixes leave too little room for both: one goes first, nobody starves."""
    model = model_of("llama", "float32")
    first = (Ask(0, 20, 0, 1, num_new=1), Ask(1, 4, 1, 1, num_new=1))
    then = (Ask(0, 20, 2, 6, num_new=1), Ask(1, 4, 3, 2, num_new=1))

    outcome = compare(model, Scenario(Sizes(page_size=1, num_pages=1), (Turn(first), Turn(then))))

    assert outcome.differences == []
    assert outcome.read_tokens >= 20
