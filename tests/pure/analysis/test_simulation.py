"""Simulated caches: exact curves and bounds against simple ones, and the published trace's figures."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind, Usage
from ramify.analysis.simulation.calls import simulate
from ramify.analysis.simulation.capacities import (
    fitted_capacities,
    parse_capacity,
    parse_lifetime,
)
from ramify.analysis.simulation.curves.bounds import belady, ttl_curve
from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import lru_curve
from ramify.analysis.simulation.replays.cache_replay import replay
from ramify.analysis.simulation.run import SimulationOptions, simulate_trace
from ramify.analysis.simulation.sources import TraceSource, page_trace
from ramify.cache import POLICIES
from ramify.errors import ConfigError, LogError
from tests.budget import examples
from tests.pure.analysis.simulated_traces import (
    BLOCK,
    MOONCAKE,
    PATHS,
    Path_,
    best_hits,
    hashed_request,
    leaf_first_hits,
    lru_hits,
    prefix_id,
    trace_of,
)

needs_mooncake = pytest.mark.skipif(
    not MOONCAKE.exists(), reason=f"the Mooncake trace is not at {MOONCAKE}"
)


@given(PATHS)
def test_one_pass_equals_an_lru_cache_of_each_size(paths: list[Path_]) -> None:
    """The curve has, at every capacity, the hits of a cache of that capacity."""
    curve = lru_curve(ReuseRuns.of(trace_of(paths)))

    for capacity in range(1, 20):
        assert curve.hit_rate(capacity * BLOCK) * curve.total_tokens == pytest.approx(
            lru_hits(paths, capacity) * BLOCK
        )


@given(PATHS, st.integers(1, 20))
def test_lru_replay_equals_the_one_pass_curve(paths: list[Path_], capacity: int) -> None:
    """`PrefixCache` with the policy lru hits what stack distances predict, where prompts fit."""
    trace = trace_of(paths)

    result = replay(trace, (capacity + 6) * BLOCK, "lru")

    assert result.num_hit == lru_hits(paths, capacity + 6) * BLOCK
    assert result.num_uncached == 0


@given(PATHS, st.integers(6, 20), st.integers(1, 3), st.sampled_from(["lru", "fifo"]))
def test_policies_at_page_sizes_equal_a_cache_of_single_pages(
    paths: list[Path_], capacity: int, blocks_per_page: int, policy: str
) -> None:
    """`simulate` hits, by policy, page size and capacity, what a cache that tries all leaves hits."""
    requests = [hashed_request(path, number) for number, path in enumerate(paths)]
    page_size = blocks_per_page * BLOCK
    pages = [
        tuple(prefix_id(path[at : at + blocks_per_page]) for at in _starts(path, blocks_per_page))
        for path in paths
    ]

    result = simulate(requests, capacity=capacity * page_size, policy=[policy], page_size=page_size)

    total = sum(len(path) * BLOCK + 1 for path in paths)
    hits = leaf_first_hits(pages, capacity, policy)
    assert result.curve[policy][capacity * page_size] * total == pytest.approx(hits * page_size)
    hits = lru_hits(pages, capacity)
    assert result.one_pass_lru[capacity * page_size] * total == pytest.approx(hits * page_size)


def _starts(path: Path_, blocks_per_page: int) -> range:
    return range(0, len(path) // blocks_per_page * blocks_per_page, blocks_per_page)


@settings(max_examples=examples(60))
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_belady_is_the_best_of_all_choices(paths: list[Path_], capacity: int) -> None:
    """MIN hits as many pages as the best of all sequences of evictions."""
    trace = trace_of(paths)

    rate = belady(ReuseRuns.of(trace), capacity * BLOCK)

    assert rate * trace.total_tokens == pytest.approx(best_hits(paths, capacity) * BLOCK)


@given(PATHS, st.lists(st.floats(0, 100), min_size=40, max_size=40), st.floats(0.1, 60))
def test_a_lifetime_counts_from_the_last_use(
    paths: list[Path_], gaps: list[float], lifetime: float
) -> None:
    """A page is hit if its last use is at most a lifetime ago, whatever came between."""
    starts = list(itertools.accumulate(gaps))
    requests = [
        hashed_request(path, number, start_s=starts[number]) for number, path in enumerate(paths)
    ]
    last: dict[Path_, float] = {}
    hits = 0
    for path, start in zip(paths, starts, strict=False):
        for depth in range(len(path)):
            prefix = path[: depth + 1]
            hits += start - last.get(prefix, float("-inf")) <= lifetime
            last[prefix] = start

    trace = page_trace(requests).trace
    rates = ttl_curve(ReuseRuns.of(trace), [lifetime])

    assert rates[lifetime] * trace.total_tokens == pytest.approx(hits * BLOCK)


@given(PATHS, st.sampled_from(sorted(POLICIES)), st.integers(1, 20))
def test_no_policy_beats_the_bounds(paths: list[Path_], policy: str, capacity: int) -> None:
    """Every policy hits at most what MIN does, and MIN at most what an infinite cache does."""
    trace = trace_of(paths)
    reuse = ReuseRuns.of(trace)

    rate = replay(trace, capacity * BLOCK, policy).hit_rate

    best = belady(reuse, capacity * BLOCK)
    assert rate <= best + 1e-12
    assert best <= lru_curve(reuse).infinite + 1e-12


def test_ids_of_blocks_alone_become_ids_of_prefixes() -> None:
    """Equal block ids after different blocks share nothing."""
    prompts = [(1, 2, 3), (9, 2, 3), (1, 2, 4)]
    requests = [
        LoggedRequest("t", line, hashed=HashedPrompt(BLOCK, ids, BLOCK * len(ids)))
        for line, ids in enumerate(prompts, 1)
    ]

    trace = page_trace(requests).trace

    assert lru_curve(ReuseRuns.of(trace)).infinite == pytest.approx(2 / 9)  # 1, 2 of the third


def test_a_trace_is_replayed_in_order_of_arrival() -> None:
    """Requests are sorted by time, and lines that a writer delayed change nothing."""
    paths = [(0, 1), (0, 1, 2), (1,), (0,)]
    requests = [hashed_request(path, number) for number, path in enumerate(paths)]

    sorted_rates = simulate(requests, capacity=[8, 16], policy="lru").to_json()
    shuffled = [requests[2], requests[0], requests[3], requests[1]]

    assert simulate(shuffled, capacity=[8, 16], policy="lru").to_json() == sorted_rates


def test_larger_pages_share_less() -> None:
    """Pages of two blocks hit a prefix of whole pages only."""
    requests = [hashed_request(path, number) for number, path in enumerate([(0, 1, 2), (0, 1, 2)])]

    whole = simulate(requests, capacity=80, policy="lru")
    double = simulate(requests, capacity=80, policy="lru", page_size=2 * BLOCK)

    assert whole.infinite == pytest.approx(3 * BLOCK / 26)
    assert double.infinite == double.curve["lru"][80] == pytest.approx(2 * BLOCK / 26)


def test_texts_share_pages_of_whole_prefixes() -> None:
    """Prompts as text share the full pages before the first different token, per model."""

    def chat(model: str, *texts: str) -> LoggedRequest:
        return LoggedRequest(
            "log",
            1,
            segments=(
                Segment("settings.model", SegmentKind.SETTING, model),
                *(
                    Segment("messages[0]", SegmentKind.MESSAGE, text, label="user")
                    for text in texts
                ),
            ),
        )

    head = "a b c d e f g h i j k l m n o p"
    requests = [chat("m", head, "x"), chat("m", head, "y"), chat("other", head, "x")]

    result = simulate(requests, capacity=1000, policy="lru", page_size=4)

    num_tokens = result.facts.input_tokens
    assert num_tokens == 3 * 19  # 16 letters, "x", and a label each
    assert result.infinite * num_tokens == 16
    assert result.curve["lru"][1000] == result.infinite
    assert result.facts.token_counts == "estimated"


def test_answers_are_cached_only_if_asked() -> None:
    """With outputs inserted, the next turn hits the answer too."""

    def turn(*texts: str, answer: str) -> LoggedRequest:
        segments = [Segment("m", SegmentKind.MESSAGE, text) for text in texts]
        return LoggedRequest(
            "log",
            1,
            segments=tuple(segments),
            output=(Segment("output", SegmentKind.MESSAGE, answer),),
        )

    requests = [turn("1 2 3 4", answer=" 5 6 7 8"), turn("1 2 3 4", " 5 6 7 8", " 9", answer=" 0")]
    options = {"capacity": 100, "policy": "lru", "page_size": 2}

    without = simulate(requests, **options)  # type: ignore[arg-type]
    inserted = simulate(requests, insert_outputs=True, **options)  # type: ignore[arg-type]

    assert without.infinite < inserted.infinite
    assert inserted.curve["lru"][100] == inserted.infinite == inserted.one_pass_lru[100]


def test_answers_without_text_take_room() -> None:
    """An answer of which only the length is known fills pages that nobody shares."""
    requests = [hashed_request((0, 1), number, output=3 * BLOCK) for number in range(3)]

    result = simulate(requests, capacity=5 * BLOCK, policy="lru", insert_outputs=True)

    assert result.facts.distinct_pages == 2 + 3 * 3
    assert result.infinite == pytest.approx(2 * 2 * BLOCK / (3 * (2 * BLOCK + 1)))


def test_requests_of_a_warm_up_are_not_counted() -> None:
    """The warm-up fills the cache; the rates are over the requests after it."""
    requests = [hashed_request((0, 1), number) for number in range(4)]

    result = simulate(requests, capacity=100, policy="lru", warm_up=0.5)

    share = 2 * BLOCK / (2 * BLOCK + 1)
    assert result.infinite == result.one_pass_lru[100] == pytest.approx(share)
    assert result.curve["lru"][100] == result.belady[100] == pytest.approx(share)
    assert result.ttl[60.0] == pytest.approx(share)


def test_an_interrupt_leaves_the_parts_that_are_complete() -> None:
    """Ctrl-C during a replay keeps the curves before it and says that parts are missing."""
    source = page_trace([hashed_request((0, 1), number) for number in range(4)])

    def interrupt(part: str, done: int, total: int) -> None:
        if part == "auto":
            raise KeyboardInterrupt

    result = simulate_trace(source, SimulationOptions(capacities=(16,)), progress=interrupt)

    assert result.is_partial
    assert set(result.curve) == {"lru", "auto"}
    assert result.curve["lru"].keys() == {16}
    assert result.curve["auto"] == {}
    assert result.one_pass_lru.keys() == result.belady.keys() == {16}


def test_an_interrupt_while_reading_keeps_what_was_read() -> None:
    """Ctrl-C while the log is read simulates the requests so far and says that parts are missing."""

    def requests() -> Iterator[LoggedRequest]:
        yield from (hashed_request((0, 1), number) for number in range(3))
        raise KeyboardInterrupt

    result = simulate(requests(), capacity=16, policy="lru")

    assert result.is_partial
    assert result.facts.num_requests == 3


@given(st.lists(st.lists(st.integers(-(2**63), 2**64 - 1), max_size=4), min_size=1, max_size=8))
def test_ids_may_have_any_64_bits(prompts: list[list[int]]) -> None:
    """Block ids are hashes: narrow, wide, signed or unsigned, in any mixture."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for ids in prompts:
        prefixes = [tuple(key % 2**64 for key in ids[: end + 1]) for end in range(len(ids))]
        hits += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    requests = [
        LoggedRequest("t", line, hashed=HashedPrompt(BLOCK, tuple(ids), BLOCK * len(ids) + 1))
        for line, ids in enumerate(prompts, 1)
    ]

    trace = page_trace(requests).trace

    curve = lru_curve(ReuseRuns.of(trace))
    assert curve.infinite * trace.total_tokens == pytest.approx(hits * BLOCK)


def test_scopes_and_models_share_nothing() -> None:
    """Equal block ids of another tenant, or of another model, are other pages."""
    hashed = HashedPrompt(BLOCK, (0, 1), 2 * BLOCK + 1)
    requests = [
        LoggedRequest("t", line, hashed=hashed, cache_scope=scope, model=model)
        for line, (scope, model) in enumerate([("a", "m"), ("b", "m"), ("a", "n"), ("a", "m")], 1)
    ]

    trace = page_trace(requests).trace

    curve = lru_curve(ReuseRuns.of(trace))
    assert curve.infinite * trace.total_tokens == pytest.approx(2 * BLOCK)
    assert len(np.unique(trace.page_ids)) == 6


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1000000", 10**6), ("1M", 10**6), ("2.5m", 2_500_000), ("500k", 500_000), ("1_000", 1000)],
)
def test_capacities_are_tokens(text: str, tokens: int) -> None:
    """Capacities are written as in the docs of engines."""
    assert parse_capacity(text) == tokens


def test_capacities_in_bytes_need_a_model() -> None:
    """Bytes of K/V become tokens of a model; without a model the error names the way out."""
    assert parse_capacity("24GB", token_bytes=131_072) == 24 * 10**9 // 131_072
    assert parse_capacity("1GiB", token_bytes=1024) == 2**20
    with pytest.raises(ConfigError, match="--model"):
        parse_capacity("24GB")


@pytest.mark.parametrize("text", ["", "M", "1.2.3M", "-5", "1e6", "5 apples"])
def test_other_texts_are_no_capacities(text: str) -> None:
    """What is no capacity is refused with examples."""
    with pytest.raises(ConfigError, match="1M"):
        parse_capacity(text)


@pytest.mark.parametrize(
    ("tokens", "page_size", "expected"),
    [
        (14_000, 16, (2_000, 5_000, 10_000, 20_000)),
        (20_000, 16, (2_000, 5_000, 10_000, 20_000)),
        (90_000_000, 512, (10_000_000, 20_000_000, 50_000_000, 100_000_000)),
        (40, 16, (20, 50)),
        (0, 16, (20,)),
        (1, 1, (1,)),
    ],
)
def test_capacities_that_fit_end_where_the_hit_rate_stops_rising(
    tokens: int, page_size: int, expected: tuple[int, ...]
) -> None:
    """Round numbers, none of them below a page."""
    assert fitted_capacities(tokens, page_size) == expected


def test_without_capacities_those_are_taken_in_which_the_hit_rate_rises() -> None:
    """LRU at the largest is the infinite cache, at the next smaller one it is less."""
    paths = [tuple(range(start, start + 8)) for _ in range(3) for start in range(0, 96, 8)]
    requests = [hashed_request(path, at) for at, path in enumerate(paths)]

    result = simulate(requests, policy="lru")
    unshared = simulate(requests[:12], policy="lru")

    sizes = list(result.one_pass_lru)
    rates = [result.one_pass_lru[size] for size in sizes]
    saturation = lru_curve(ReuseRuns.of(page_trace(requests).trace)).saturation_tokens
    assert sizes[-2] < saturation <= sizes[-1]
    assert rates[-1] == result.infinite > rates[-2]
    assert result.curve["lru"].keys() == result.belady.keys() == set(sizes)
    assert unshared.infinite == 0
    assert list(unshared.one_pass_lru)[-1] >= 96 * BLOCK


def test_lifetimes_have_units() -> None:
    """Lifetimes are seconds, minutes or hours."""
    assert [parse_lifetime(text) for text in ("90", "5m", "1h", 7.5)] == [90, 300, 3600, 7.5]
    with pytest.raises(ConfigError, match="5m"):
        parse_lifetime("5y")


def lengths_only() -> Iterator[LoggedRequest]:
    for line in range(1, 4):
        yield LoggedRequest("lengths.csv", line, usage=Usage(num_input=100))


def test_lengths_alone_are_refused() -> None:
    """A log of lengths gets no 0 %, but the reason why nothing can be said."""
    with pytest.raises(LogError, match="lengths only"):
        simulate(lengths_only())
    with pytest.raises(LogError, match="no requests"):
        simulate([])


def test_bad_options_name_the_way_out() -> None:
    """Unknown policies, small capacities and page sizes that do not fit are refused by name."""
    requests = [hashed_request((0, 1), 0)]

    with pytest.raises(ConfigError, match="auto, cost, fifo, lfu, lru"):
        simulate(requests, capacity=16, policy="belady")
    with pytest.raises(ConfigError, match="less than a page of 4"):
        simulate(requests, capacity=3, policy="lru")
    with pytest.raises(ConfigError, match="multiple of 4"):
        simulate(requests, capacity=16, policy="lru", page_size=6)
    with pytest.raises(ConfigError, match="at least 1 token"):
        simulate(requests, capacity=16, policy="lru", page_size=0)
    with pytest.raises(ConfigError, match="warm_up"):
        simulate(requests, capacity=16, policy="lru", warm_up=1)
    with pytest.raises(ConfigError, match="no capacity"):
        simulate(requests, capacity="", policy="lru")


@pytest.fixture(scope="module")
def conversations() -> TraceSource:
    with MOONCAKE.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return page_trace(
        LoggedRequest(
            MOONCAKE.name,
            line,
            hashed=HashedPrompt(512, tuple(row["hash_ids"]), row["input_length"]),
            start_s=row["timestamp"] / 1000,
        )
        for line, row in enumerate(rows, 1)
    )


@needs_mooncake
def test_the_published_trace_has_its_known_curves(conversations: TraceSource) -> None:
    """One pass, `PrefixCache` and lifetimes reproduce what others measured on Mooncake's trace."""
    capacities = (1_000_000, 2_000_000, 5_000_000, 10_000_000)

    result = simulate_trace(
        conversations, SimulationOptions(capacities=capacities, policies=("lru",))
    )

    expected = (5.59, 8.94, 21.70, 29.76)
    for capacity, rate in zip(capacities, expected, strict=True):
        assert result.one_pass_lru[capacity] * 100 == pytest.approx(rate, abs=0.02)
        assert result.curve["lru"][capacity] * 100 == pytest.approx(rate, abs=0.3)
    assert result.infinite * 100 == pytest.approx(37.34, abs=0.02)
    for lifetime, rate in ((60, 10.5), (300, 29.3), (600, 35.0), (1800, 37.0)):
        assert result.ttl[lifetime] * 100 == pytest.approx(rate, abs=0.05)
    assert (result.facts.page_references, result.facts.distinct_pages) == (276_491, 170_899)
