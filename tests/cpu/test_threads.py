"""Three threads on one `LLM` over the built-in model: every answer is the one of a thread alone."""

import threading

import pytest

from ramify import LLM, SamplingParams
from ramify.outputs import RequestOutput
from tests.pure.threads import joined

PROMPTS = [
    f"Mara has {n} apples and {3 * n} pears, and {'he' if n % 2 else 'she'}" for n in range(30)
]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def right() -> dict[str, tuple[int, ...]]:
    """The answer of one thread to each prompt."""
    llm = LLM("ramify-tiny", kv_cache_tokens=2048)
    return {prompt: llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS}


def assert_right(right: dict[str, tuple[int, ...]], runs: int) -> None:
    """3 threads make 30 calls each on a new `LLM`, `runs` times."""
    for _ in range(runs):
        llm, outputs = LLM("ramify-tiny", kv_cache_tokens=2048), list[RequestOutput]()
        together = threading.Barrier(3)

        def work(start: int) -> None:
            together.wait()  # noqa: B023 - joined in this turn
            for prompt in PROMPTS[start:] + PROMPTS[:start]:
                outputs.extend(llm.generate(prompt, GREEDY))  # noqa: B023

        with joined("A", lambda: work(0)), joined("B", lambda: work(1)):
            work(2)

        wrong = [output for output in outputs if output.token_ids != right[output.prompt or ""]]
        errors = [output.error for output in outputs if output.error is not None]
        repairs = llm.core.recovery.counts.rebuilds
        assert (len(outputs), len(wrong), errors, repairs) == (90, 0, [], 0)


def test_three_threads_get_right_answers(right: dict[str, tuple[int, ...]]) -> None:
    """90 calls of 3 threads are all right, and the engine is never repaired."""
    assert_right(right, 1)


@pytest.mark.slow
def test_three_threads_get_right_answers_in_twenty_runs(right: dict[str, tuple[int, ...]]) -> None:
    """The same, 20 times."""
    assert_right(right, 20)
