"""Load or compute, in virtual time: never much later than without a tier, nor than the better of the two."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramify.cache.tier_costs import LEAST_LIMIT_S, RETRY_S
from ramify.step_cost import CostModel
from tests.budget import examples
from tests.pure.virtual_tiers import PAGE, Link, VirtualEngine, filled_store

NUM_PAGES = 96
KNOWN = [7 + at % 13 for at in range(NUM_PAGES * PAGE)]
STORE = filled_store([*KNOWN, 1])
REMOTE = filled_store([*KNOWN, 1], "remote")
# 1.5 s for the longest prompt: 16 ms a page.
COST = CostModel(step_s=0.002, token_s=0.004, read_s=2e-6)
SLOW = Link(latency_s=0.2, page_s=0.369)  # pages of 369 KB at 1 MB/s
SHARE = 1.1


def prompt_of(num_pages: int, num_tokens: int) -> list[int]:
    """A prompt of which the store has the first pages."""
    rest = num_tokens - num_pages * PAGE
    return [*KNOWN[: num_pages * PAGE], *(30 + at % 17 for at in range(rest))]


def engine(link: Link, cost: CostModel = COST, **options: object) -> VirtualEngine:
    """An engine over the filled store."""
    return VirtualEngine(cost, store=STORE, link=link, **options)  # type: ignore[arg-type]


def loading(link: Link, cost: CostModel = COST) -> VirtualEngine:
    """One that believes computing to take for ever, so that it loads whatever there is."""
    return engine(link, cost, model=CostModel(0.0, 1e6, 0.0), is_calibrated=True)


@pytest.mark.parametrize("num_pages", [0, 1, 8, 24, 48, 72, 96])
def test_a_slow_store_costs_a_tenth_at_every_hit_rate(num_pages: int) -> None:
    """200 ms and 1 MB/s: from the first request on, which comes before the start's reads have ended."""
    prompt = prompt_of(num_pages, NUM_PAGES * PAGE + 1)
    without = VirtualEngine(COST).ttft(prompt)
    slow = engine(SLOW)

    for _ in range(4):
        assert slow.ttft(prompt) <= SHARE * without + LEAST_LIMIT_S


@pytest.mark.parametrize("num_pages", [0, 1, 8, 24, 48, 72, 96])
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_slow_server_costs_a_tenth_at_every_hit_rate(num_pages: int, is_measured: bool) -> None:
    """Look-ups take 200 ms too: also where nothing was read yet that would tell."""
    prompt = prompt_of(num_pages, NUM_PAGES * PAGE + 1)
    without = VirtualEngine(COST).ttft(prompt)
    slow = VirtualEngine(COST, store=REMOTE, link=SLOW)
    if not is_measured:
        slow.tiering.measurements.costs.probe_ended("remote", [])

    for _ in range(5):
        assert slow.ttft(prompt) <= SHARE * without


@pytest.mark.parametrize("num_pages", [8, 96])
def test_a_fast_server_is_looked_up_and_loaded(num_pages: int) -> None:
    """A round trip for the answer, one for the pages."""
    fast = VirtualEngine(COST, store=REMOTE, link=Link(0.0005, 0.0005))

    seconds = fast.ttft(prompt_of(num_pages, num_pages * PAGE + 1))

    assert seconds <= 0.001 + num_pages * 0.0005 + COST.step(1, num_pages * PAGE + 1) + 1e-9


@pytest.mark.parametrize("num_pages", [8, 96])
def test_a_fast_store_is_loaded_from_the_first_request_on(num_pages: int) -> None:
    """Its start has measured it: 50 ms at most."""
    fast = engine(Link(0.0005, 0.0005))
    assert fast.time.now <= 0.05

    seconds = fast.ttft(prompt_of(num_pages, num_pages * PAGE + 1))

    assert seconds <= 0.0005 + num_pages * 0.0005 + COST.step(1, num_pages * PAGE + 1) + 1e-9


def test_a_cold_disk_is_loaded_before_the_start_has_measured_it() -> None:
    """Its first reads take 110 ms, and the first request after a restart comes after 50."""
    prompt = prompt_of(NUM_PAGES, NUM_PAGES * PAGE + 1)
    without = VirtualEngine(COST).ttft(prompt)

    assert engine(Link(0.03, 0.002)).ttft(prompt) < without / 4


@given(
    latency_s=st.floats(0, 1),
    page_s=st.floats(1e-5, 0.3),
    token_s=st.floats(1e-5, 1e-2),
    step_s=st.floats(0, 0.05),
    read_s=st.floats(0, 1e-5),
    num_pages=st.integers(0, NUM_PAGES),
    num_more=st.integers(1, 64),
)
@settings(max_examples=examples(60))
def test_no_store_costs_a_request_more_than_a_tenth(
    latency_s: float,
    page_s: float,
    token_s: float,
    step_s: float,
    read_s: float,
    num_pages: int,
    num_more: int,
) -> None:
    """Whatever its latency and bandwidth, the model and the hit rate; from the first request on."""
    cost = CostModel(step_s, token_s, read_s)
    prompt = prompt_of(num_pages, num_pages * PAGE + num_more)
    without = VirtualEngine(cost).ttft(prompt)
    tiered = engine(Link(latency_s, page_s), cost)

    for _ in range(3):
        assert tiered.ttft(prompt) <= SHARE * without + LEAST_LIMIT_S


@given(
    latency_s=st.floats(0, 0.5),
    page_s=st.floats(1e-4, 0.1),
    believed=st.floats(0.1, 10),
    num_pages=st.integers(1, NUM_PAGES),
    num_more=st.integers(1, 64),
)
@example(latency_s=0.2, page_s=0.01, believed=0.1, num_pages=48, num_more=1)
@example(latency_s=0.0, page_s=0.016, believed=3.0, num_pages=96, num_more=1)
@settings(max_examples=examples(40))
def test_the_choice_is_near_the_better_of_both_once_the_medians_are_settled(
    latency_s: float, page_s: float, believed: float, num_pages: int, num_more: int
) -> None:
    """Though the engine began with a wrong belief of its own speed."""
    link = Link(latency_s, page_s)
    prompt = prompt_of(num_pages, num_pages * PAGE + num_more)
    without = VirtualEngine(COST).ttft(prompt)
    loaded = loading(link).ttft(prompt)
    model = CostModel(COST.step_s * believed, COST.token_s * believed, COST.read_s * believed)
    tiered = engine(link, model=model)
    for number in range(8):
        tiered.ttft(prompt_of(0, 200 + number))
        tiered.ttft(prompt)
    tiered.time.now += 2 * RETRY_S  # a tier that was late is measured again
    tiered.ttft(prompt)
    tiered.time.now += RETRY_S

    tiered.ttft(prompt)

    assert tiered.ttft(prompt) <= SHARE * min(without, loaded) + LEAST_LIMIT_S


def test_a_store_that_becomes_slow_is_left_and_comes_back_when_it_is_fast() -> None:
    """The request in flight loses what was expected of the load; later ones nothing."""
    prompt = prompt_of(NUM_PAGES, NUM_PAGES * PAGE + 1)
    without = VirtualEngine(COST).ttft(prompt)
    link = Link(0.001, 0.001)
    tiered = engine(link)
    fast = tiered.ttft(prompt)
    assert fast < without / 10

    link.latency_s, link.page_s = 0.2, 0.4
    hurt = tiered.ttft(prompt)
    later = [tiered.ttft(prompt) for _ in range(20)]
    link.latency_s = link.page_s = 0.001
    for _ in range(3):  # reads of the slow time end, the tier is measured, and measured again
        tiered.time.now += 2 * RETRY_S
        tiered.ttft(prompt)

    assert hurt <= SHARE * without + LEAST_LIMIT_S
    assert max(later) <= without + 1e-9
    assert tiered.ttft(prompt) == pytest.approx(fast)


def test_what_arrived_before_a_load_was_given_up_is_not_computed() -> None:
    """It stalls behind 48 of 96 pages: the request computes the others, and no page is read for nobody."""
    prompt = prompt_of(NUM_PAGES, NUM_PAGES * PAGE + 1)
    without = VirtualEngine(COST).ttft(prompt)
    link = Link(0.0, 0.004)
    tiered = engine(link, staging_pages=96)  # reads have half of the buffers
    begin_s = tiered.time.now
    request_id = tiered.add(prompt)
    link.page_s = 1e3

    ttft_s = tiered.finish()[request_id] - begin_s

    assert tiered.core.tiering is not None
    counts = tiered.core.tiering.counts
    assert (counts.loads, counts.loads_late) == (1, 1)
    assert (counts.loaded, counts.computed) == ({"disk": 48}, {"disk": 48})
    assert ttft_s <= SHARE * without + LEAST_LIMIT_S


def test_a_load_of_a_request_that_cannot_run_yet_may_take_its_time() -> None:
    """One row: while the first request answers, the second one's pages come, slower than computed."""
    prompts = [prompt_of(0, 60), prompt_of(NUM_PAGES, NUM_PAGES * PAGE + 1)]
    alone_s = VirtualEngine(COST).ttft(prompts[1])
    link = Link(0.0, 0.01)
    engines = [engine(link, max_num_seqs=1), VirtualEngine(COST, max_num_seqs=1)]
    seconds = []
    for virtual_engine in engines:
        for _ in range(2):  # the tier's first reads end, and are taken
            virtual_engine.ttft(prompts[0])
        link.page_s = 0.02
        _, second = (virtual_engine.add(prompt, max_tokens=400) for prompt in prompts)
        begin_s = virtual_engine.time.now
        seconds.append(virtual_engine.finish()[second] - begin_s)

    tiering = engines[0].core.tiering
    assert tiering is not None
    assert (tiering.counts.loads, tiering.counts.loads_late) == (1, 0)
    assert tiering.counts.loaded["disk"] == NUM_PAGES
    assert seconds[0] < seconds[1] - 0.9 * alone_s
