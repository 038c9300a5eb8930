"""What decoding costs the host, counted in calls of Python functions, which depends on no machine."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from python_calls import count_calls

from ramify.engine.step import SampledTokens, StepPlan, StepResult
from tests.pure.engine_bench import Bench

PAGE_SIZE = 16
TOKEN = SampledTokens((7,))


class InstantDevice:
    """Answers token 7 to everything."""

    def __init__(self) -> None:
        self._results = deque[StepResult]()

    def begin(self, plan: StepPlan) -> None:
        self._results.append(StepResult({spec.request_id: TOKEN for spec in plan.samples}, {}))

    def finish(self) -> StepResult:
        return self._results.popleft()

    def zero_pages(self, pages: Sequence[int]) -> None:
        raise AssertionError("no step fails")

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("no page is copied")


class OverlappingDevice(InstantDevice):
    """The same, one step ahead."""

    begin_ahead = InstantDevice.begin


def num_calls(num_running: int, device: InstantDevice, **params: Any) -> int:
    """Python calls of as many decode steps as a page has tokens: each request enters one page."""
    bench = Bench(pool_tokens=1 << 13, page_size=PAGE_SIZE)
    bench.core.executor = device
    for at in range(num_running):
        bench.add([1 + at, 2, 3 + at, 4], max_tokens=200, ignore_eos=True, **params)
    for _ in range(PAGE_SIZE):
        bench.core.step()
    count = count_calls(bench.core.step, PAGE_SIZE)
    assert bench.core.num_steps >= 2 * PAGE_SIZE - 1
    return count


@pytest.mark.parametrize(
    ("device", "params", "limit"),
    [
        (InstantDevice, {}, 13),
        (OverlappingDevice, {}, 14),
        (OverlappingDevice, {"temperature": 0.7, "seed": 1}, 14),
        (InstantDevice, {"presence_penalty": 0.5}, 21),
    ],
)
def test_a_token_takes_few_calls(
    device: type[InstantDevice], params: dict[str, Any], limit: int
) -> None:
    """A request more in a step costs this many calls, its share of publishing pages included."""
    few, more = (num_calls(num_running, device(), **params) for num_running in (8, 24))

    assert (more - few) / 16 / PAGE_SIZE <= limit
