"""Pins that requests ask for: few for each conversation and for each tenant, all pages kept."""

import pytest

from ramify.engine.cache_options import MAX_NESTED_PINS, MAX_TENANT_PINS
from ramify.errors import InvalidParamsError
from ramify.outputs import PrefixReport
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench


def pinned(bench: Bench, prompt: list[int], ttl_s: float = 300.0, tenant: str = "a") -> int:
    """Run a request that pins its prompt; returns how many pins were refused."""
    params = SamplingParams(max_tokens=1)
    retention = ((len(prompt), ttl_s),)
    bench.core.add_request(prompt, params, tenant=tenant, retention=retention, pin_share=0.9)
    reports: list[PrefixReport] = []
    while bench.core.has_unfinished:
        reports += [event.prefix for event in bench.core.step() if event.prefix is not None]
    [report] = reports
    return report.num_pins_refused


def test_a_conversation_that_pins_each_turn_keeps_its_pages_with_few_pins() -> None:
    """The first prefixes, which others may begin with, and the newest; another's are left alone."""
    bench = Bench()
    prompt = list(range(1, 13))
    assert pinned(bench, prompt, tenant="b") == 0
    for turn in range(40):
        assert pinned(bench, prompt) == 0
        prompt += [1 + turn] * 4
    cache = bench.core.cache

    lengths = [len(pin.key) for pin in cache.pins("a")]

    assert lengths == [*range(12, 12 + 4 * MAX_NESTED_PINS, 4), 12 + 4 * 39]
    assert len(cache.pins("b")) == 1
    cache.clear()
    assert cache.stats().cached_pages == cache.stats().pinned_pages == 3 + 39 + 3


def test_a_pin_that_ends_later_is_not_replaced() -> None:
    """Pins for an hour stay among pins for five minutes."""
    bench = Bench()
    for turn in range(2 * MAX_NESTED_PINS):
        assert pinned(bench, [7] * 4 * (turn + 1), 300.0 if turn < MAX_NESTED_PINS else 3600.0) == 0
    hour = [pin for pin in bench.core.cache.pins("a") if pin.ttl_s == 3600.0]

    assert pinned(bench, [7] * 4 * 30, 300.0) == 0

    assert [pin for pin in bench.core.cache.pins("a") if pin.ttl_s == 3600.0] == hour


def test_pins_of_a_tenant_are_counted() -> None:
    """Many prompts that differ in their last page: 513 pins would need few pages, but keep 513 keys."""
    bench = Bench(pool_tokens=16_384)
    refused = [
        pinned(bench, [3, 3, 3, 3, 1 + at % 40, 1 + at // 40, 1, 1])
        for at in range(MAX_TENANT_PINS + 3)
    ]

    assert refused == [0] * MAX_TENANT_PINS + [1] * 3
    assert pinned(bench, [5] * 8, tenant="b") == 0


def test_a_pin_share_is_checked_without_pins() -> None:
    """A share above 1 is an error even in a request that pins nothing."""
    bench = Bench()

    with pytest.raises(InvalidParamsError, match="pin_share"):
        bench.core.add_request([1, 2, 3], SamplingParams(max_tokens=1), pin_share=1.5)
