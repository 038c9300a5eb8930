"""The choice between loading and computing, over figures that the tests give it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.cache.tier_costs import (
    FIRST_RETRY_S,
    LEAST_LIMIT_S,
    NUM_SAMPLES,
    RETRY_S,
    PrefillSpeed,
    ReadSpeed,
    TierCosts,
)
from ramify.step_cost import CostModel

SIZE = 16


def costs_of(
    token_s: float = 0.001, read_s: float = 0.0, **speeds: tuple[float, float]
) -> TierCosts:
    """The choice where tiers have a latency and seconds per page."""
    costs = TierCosts(CostModel(0.0, token_s, read_s), page_size=SIZE, max_step_tokens=512)
    for tier, (latency_s, page_s) in speeds.items():
        costs.probe_ended(tier, [(pages, latency_s + pages * page_s) for pages in (1, 1, 8)])
    return costs


@given(
    latency_s=st.floats(0, 1),
    page_s=st.floats(1e-6, 1),
    lengths=st.lists(st.integers(1, 500), min_size=NUM_SAMPLES, max_size=40),
    num_bad=st.integers(0, 2),
)
def test_latency_and_bandwidth_are_told_apart(
    latency_s: float, page_s: float, lengths: list[int], num_bad: int
) -> None:
    """By reads of different lengths; two that had to wait for a minute do not matter."""
    lengths[-NUM_SAMPLES:] = [*range(1, NUM_SAMPLES + 1)]
    speed = ReadSpeed()
    for index, num_pages in enumerate(lengths):
        waited_s = 60.0 * (index in (len(lengths) - 5, len(lengths) - 9)[:num_bad])
        speed.add(num_pages, latency_s + page_s * num_pages + waited_s)

    assert speed.page_s == pytest.approx(page_s, rel=1e-6, abs=1e-9)
    assert speed.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-6)


def test_reads_of_one_length_follow_a_store_that_becomes_faster() -> None:
    """They do not tell latency from bandwidth, but a page takes no longer than its share."""
    speed = ReadSpeed()
    for num_pages in (1, 8):
        speed.add(num_pages, 1.0 * num_pages)
    for _ in range(NUM_SAMPLES):
        speed.add(10, 0.1)

    assert speed.read_s(10) == pytest.approx(0.1)


def test_a_first_step_that_compiles_does_not_make_loads_look_cheap() -> None:
    """The model counts as a step, until most of the steps disagree with it."""
    prefill = PrefillSpeed(CostModel(0.0, 0.001, 0.0), 512)
    prefill.add(100, 0, 30.0)
    assert prefill.compute_s(0, 100) == pytest.approx(0.1)

    for _ in range(2):
        prefill.add(100, 0, 0.3)

    assert prefill.compute_s(0, 100) == pytest.approx(0.3)


def test_a_prefill_takes_its_steps_and_its_attention() -> None:
    """1,000 tokens behind 24 others in three steps; row i of them reads 25 + i tokens."""
    prefill = PrefillSpeed(CostModel(1.0, 0.1, 0.001), 400)

    expected = 3 * 1.0 + 1000 * 0.1 + 0.001 * sum(range(25, 1025))

    assert prefill.compute_s(24, 1024) == pytest.approx(expected)
    assert prefill.compute_s(24, 24) == 0.0


def test_pages_of_a_fast_tier_are_loaded_and_those_of_a_slow_one_behind_them_computed() -> None:
    """The best length ends where the tier changes."""
    costs = costs_of(host=(0.0, 0.001), disk=(0.1, 0.1))

    plan = costs.plan(["host"] * 4 + ["disk"] * 60, 0, 1025, {})

    assert plan.num_pages == 4
    assert plan.load_s == pytest.approx(0.004)


def test_a_short_prefix_is_computed_and_a_long_one_loaded() -> None:
    """200 ms of latency against 16 ms a page."""
    costs = costs_of(disk=(0.2, 0.001))

    assert costs.plan(["disk"] * 10, 0, 161, {}).num_pages == 0
    assert costs.plan(["disk"] * 20, 0, 321, {}).num_pages == 20
    assert costs.speed_of("disk", 1000).pays_from == 14


def test_what_others_read_from_a_tier_comes_first() -> None:
    """100 pages of theirs take as long as computing 6 of ours."""
    costs = costs_of(disk=(0.0, 0.001))

    assert costs.plan(["disk"] * 8, 0, 129, {"disk": 100}).num_pages == 8
    assert costs.plan(["disk"] * 8, 0, 129, {"disk": 200}).num_pages == 0
    assert costs.plan(["disk"] * 8, 0, 129, {"host": 200}).num_pages == 8


def test_later_tokens_take_longer_to_compute_so_that_their_pages_pay() -> None:
    """Attention reads all tokens before: a page that does not pay at the beginning does at 16k."""
    costs = costs_of(token_s=1e-4, read_s=1e-7, disk=(0.0, 0.005))

    assert costs.plan(["disk"] * 4, 0, 65, {}).num_pages == 0
    assert costs.plan(["disk"] * 4, 1000, 16065, {}).num_pages == 4
    assert costs.speed_of("disk", 2000).pays_from is not None


def test_a_tier_that_never_pays_says_so() -> None:
    """With what a page takes."""
    speed = costs_of(token_s=1e-6, disk=(0.2, 0.1)).speed_of("disk", 100)

    assert speed.pays_from is None
    assert speed.reason == (
        "computing is faster at any length; 100 pages: computed in 1.6 ms, loaded in 10.20 s"
    )


def test_a_tier_that_was_never_measured_is_tried() -> None:
    """Before its first reads have ended too: the first request after a start is worth most."""
    costs = costs_of()
    costs.probe_begun("disk")
    assert costs.plan(["disk"], 0, 17, {}).num_pages == 1
    assert costs.speed_of("disk", 10).reason == "its first reads have not ended"

    costs.probe_ended("disk", [])

    assert costs.plan(["disk"], 0, 17, {}).num_pages == 1
    assert costs.speed_of("disk", 10).reason == "nothing was read yet"


def test_nothing_is_loaded_from_a_tier_while_it_is_measured_again() -> None:
    """What is known of it is in doubt."""
    costs = costs_of(disk=(0.0, 0.001))
    costs.probe_begun("disk")

    assert costs.plan(["disk"], 0, 17, {}).num_pages == 0


def test_a_tier_that_is_slower_than_computing_is_measured_again() -> None:
    """Its other load may be over; a probe in flight is not begun twice."""
    costs = costs_of(disk=(10.0, 10.0))
    assert not costs.must_probe("disk", 0.0)
    assert not costs.must_probe("disk", RETRY_S / 2)
    assert costs.must_probe("disk", RETRY_S)
    costs.probe_begun("disk")
    assert not costs.must_probe("disk", 2 * RETRY_S)

    costs.probe_ended("disk", [(1, 0.001)])

    assert costs.plan(["disk"] * 10, 0, 161, {}).num_pages == 10


def test_a_tier_that_was_late_is_used_no_more_until_it_is_measured() -> None:
    """Each further late load doubles the pause, one in time resets it."""
    costs = costs_of(disk=(0.0, 0.001))
    costs.late("disk", 0.0)
    assert costs.plan(["disk"] * 10, 0, 161, {}).num_pages == 0
    assert costs.must_probe("disk", FIRST_RETRY_S)
    costs.probe_ended("disk", [(1, 0.001)])
    assert costs.plan(["disk"] * 10, 0, 161, {}).num_pages == 10

    costs.late("disk", 10.0)
    assert not costs.must_probe("disk", 10.0 + FIRST_RETRY_S)
    costs.probe_ended("disk", [(1, 0.001)])
    costs.in_time("disk")
    costs.late("disk", 20.0)

    assert costs.must_probe("disk", 20.0 + FIRST_RETRY_S)


@pytest.mark.parametrize(
    ("elapsed_s", "num_arrived", "left_s", "expected"),
    [
        (0.159, 0, 9.0, False),  # a tenth of 1.6 s
        (0.161, 0, 9.0, True),
        (0.9, 50, 0.7, False),  # half of the pages have saved 0.8 s, the rest comes sooner than 0.8
        (0.9, 50, 0.9, True),  # ... or later
        (0.97, 50, 0.1, True),  # more than they have saved, and a tenth
    ],
)
def test_a_request_loses_a_tenth_of_computing_at_most(
    elapsed_s: float, num_arrived: int, left_s: float, expected: bool
) -> None:
    """100 pages, computed in 1.6 s, and a tier that was never measured."""
    costs = costs_of()
    wait = costs.wait(5.0, 5.0, 0, 1600)

    assert costs.is_lost(wait, 5.0 + elapsed_s, num_arrived, 100, left_s) is expected


def test_a_request_waits_for_what_is_expected_with_nothing_to_show() -> None:
    """Readers share a disk: all batches may come at the end. And no wait is shorter than a wake-up."""
    costs = costs_of()

    assert costs.wait(0.0, 1.0, 0, 1600).limit_s == pytest.approx(1.2)
    assert costs.wait(0.0, 0.0, 0, 17).limit_s == LEAST_LIMIT_S
