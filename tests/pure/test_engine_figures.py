"""The arithmetic behind the engine benchmarks: rooflines, ratios, verdicts, tables."""

import random
from typing import Any

import pytest
from engines.contract import Answer, Entry
from engines.judge import LIMIT, Verdict, hidden, judge, mismatches
from engines.models import shape_of
from engines.overhead import inside
from engines.plant import slowed
from engines.report import best_peer, table
from engines.roofline import Machine, Turn, batch_seconds, seconds
from engines.run import Cell, ratios
from engines.speculation import EDIT_EVERY, PROMPT, edited, until_repeated
from engines.stats import median_interval, paired_ratios
from engines.stopwatch import Stopwatch
from engines.worker import carry_out
from engines.workloads import WORKLOADS, Task, task_of

KNOWN = Machine(peak=487e9, bandwidth=48.8e9, value_bytes=4)


class FakeClock:
    """A clock that moves only when a test advances it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cell(name: str, *totals: float, failed: str = "") -> Cell:
    """Return a cell of workload W1 with the given total times."""
    made = Cell(Entry(name, name, "ours"), WORKLOADS["W1"], failed=failed)
    for total in totals:
        sample: dict[str, Any] = {"total_s": total, "ttft_s": None, "between_s": None}
        made.samples.append(sample | {"tokens": [[1, 2]], "facts": {}})
    return made


class Waiting:
    """An engine whose third request starts two seconds late, since its prompt is computed last."""

    def generate(self, prompts: Any, num_new: int) -> Answer:
        tokens = [[7] * num_new for _ in prompts]
        return Answer(tokens, [1.0, 1.0, 3.0], [6.0, 6.0, 7.0])


def test_a_decode_step_holds_no_prompt_of_others() -> None:
    """`decode_s` is of the request that starts last; `between_s`, what most of them see, is longer."""
    engine: Any = Waiting()

    reply = carry_out(engine, Task([], [[[1], [2], [3]]], 5))

    assert reply["decode_s"] == 1.0
    assert reply["between_s"] == 1.25


# -- roofline ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "known_s"),
    [("W1", 0.82), ("W2cold", 0.74), ("W2warm", 0.51), ("W3", 1.95), ("W4", 3.84)],
)
def test_rooflines_are_those_computed_elsewhere(workload: str, known_s: float) -> None:
    """Rooflines of model S in float32 equal those of an independent program."""
    bound_s = seconds(WORKLOADS[workload].roofline, shape_of("S"), KNOWN)

    assert bound_s == pytest.approx(known_s, abs=0.03)


def test_a_shared_prefix_is_computed_and_read_once() -> None:
    """A prefix shared by 64 requests costs less than twice the roofline of a single request."""
    shape = shape_of("S")

    single = seconds([Turn(0, 2048, 2064, 1, 1)], shape, KNOWN)
    shared = seconds([Turn(0, 2048, 2064, 64, 1)], shape, KNOWN)
    alone = seconds([Turn(0, 0, 2064, 64, 1)], shape, KNOWN)

    assert single < shared < 2 * single
    assert alone > 40 * shared / 2


def test_a_single_request_decodes_at_the_speed_of_memory() -> None:
    """The decode roofline of a single request is its weights and K/V read at full bandwidth."""
    shape = shape_of("M")
    turn, empty = Turn(512, 512, 513, 1, 2), Turn(512, 512, 513, 1, 1)

    step = seconds([turn], shape, KNOWN) - seconds([empty], shape, KNOWN)

    read = shape.layer_weights + shape.head_weights + 514 * shape.kv_values
    assert step == pytest.approx(4 * read / KNOWN.bandwidth)


def test_prompts_have_the_roofline_of_what_they_share() -> None:
    """Requests given as token ids: that of the lengths; each of several prefixes is computed once."""
    shape = shape_of("S")

    def prompts(first: int) -> list[list[int]]:
        return [[first] * 500 + [own] * 20 for own in range(1_000, 1_008)]

    group = batch_seconds(prompts(1), 5, shape, KNOWN)
    two = batch_seconds(prompts(2) + prompts(1), 1, shape, KNOWN)

    assert group == pytest.approx(seconds([Turn(0, 500, 520, 8, 5)], shape, KNOWN))
    assert two == pytest.approx(2 * batch_seconds(prompts(1), 1, shape, KNOWN))


# -- workloads -----------------------------------------------------------------------------------


def test_a_warm_workload_asks_other_things_about_the_same_prefix() -> None:
    """W2warm reuses the prefix of its repetition's W2cold and asks other questions about it."""
    cold, warm = (task_of(name, 3, 8192).turns[0] for name in ("W2cold", "W2warm"))
    other = task_of("W2cold", 4, 8192).turns[0]

    prefixes = {tuple(prompt[:1024]) for prompt in cold + warm}
    assert len(prefixes) == 1
    assert len({tuple(prompt) for prompt in cold + warm}) == 64
    assert tuple(other[0][:1024]) not in prefixes


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_prompts_have_the_lengths_that_the_roofline_is_of(name: str) -> None:
    """Each turn has the requests and tokens, answers included, that its roofline assumes."""
    workload = WORKLOADS[name]

    task = task_of(name, 0, 8192)

    length = 0
    assert len(task.turns) == len(workload.roofline)
    for prompts, turn in zip(task.turns, workload.roofline, strict=True):
        length += len(prompts[0])
        assert {len(prompt) for prompt in prompts} == {len(prompts[0])}
        assert (len(prompts), length, task.num_new) == (
            turn.num_requests,
            turn.prompt,
            turn.num_new,
        )
        length += task.num_new
    assert length == workload.request_tokens or name == "W3"


def test_an_edited_text_is_the_code_but_for_its_edits() -> None:
    """The edited prompt has PROMPT tokens and changes every `EDIT_EVERY`th token of the code."""
    code = until_repeated([*range(100, 340), 105, 106])

    prompt = edited(code, random.Random(1), 32000)

    assert (len(code), len(prompt), prompt[-1]) == (240, PROMPT, 100)
    kept = sum(a == b for a, b in zip(prompt[-241:-1], code, strict=True))
    assert kept == 240 - 240 // EDIT_EVERY


# -- statistics ----------------------------------------------------------------------------------


def test_ratios_are_of_the_same_repetition() -> None:
    """A slow phase that covers both sides of a pair does not change its ratio."""
    assert paired_ratios([2.0, 20.0, 200.0], [1.0, 10.0]) == [2.0, 2.0]


def test_the_interval_of_ten_values_is_known() -> None:
    """For 10 values the sign test's interval is the 2nd to the 9th value, at 97.9 %."""
    interval = median_interval(list(range(10)))

    assert (interval.low, interval.mid, interval.high) == (1, 4.5, 8)
    assert interval.level == pytest.approx(1 - 22 / 1024)


def test_too_few_values_say_so() -> None:
    """Three values cannot reach 95 %; the interval reports the level that they reach."""
    interval = median_interval([3.0, 1.0, 2.0])

    assert (interval.low, interval.high, interval.level) == (1.0, 3.0, 0.75)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """At least 95 % of intervals from exponential samples contain the true median."""
    rng = random.Random(1)
    trials = [median_interval([rng.expovariate(1.0) for _ in range(12)]) for _ in range(2000)]

    held = sum(interval.low <= 0.6931 <= interval.high for interval in trials)

    assert held / len(trials) > 0.95


# -- the verdict of perf.py ----------------------------------------------------------------------


def noisy_pairs(factor: float, rng: random.Random, count: int) -> tuple[list[float], list[float]]:
    """Return paired times, the first `factor` times longer, from a machine with slow phases.

    The phase is that of the pair and may double everything; each side has 4 % of its own.
    """
    now, base = [], []
    for _ in range(count):
        phase = rng.choice([1.0, 1.0, 1.3, 2.0])
        now.append(factor * phase * rng.lognormvariate(0.0, 0.04))
        base.append(phase * rng.lognormvariate(0.0, 0.04))
    return now, base


def verdict_of(now: list[float], base: list[float]) -> Verdict:
    return judge("cell", {"end_to_end_s": now}, {"end_to_end_s": base})[0]


def share_failed(factor: float) -> float:
    """Return how often a run fails: suspect after 12 pairs and slower after 24 more."""
    rng = random.Random(f"verdict {factor}")
    failed = 0
    for _ in range(400):
        now, base = noisy_pairs(factor, rng, 12)
        if verdict_of(now, base).suspect:
            more, others = noisy_pairs(factor, rng, 24)
            failed += verdict_of(now + more, base + others).slower
    return failed / 400


def test_ten_percent_is_found_in_noise() -> None:
    """A planted slowdown of 10 % fails 97 % of runs though single times differ by 100 %."""
    assert share_failed(1.10) > 0.97


def test_noise_alone_does_not_fail() -> None:
    """Equal and faster code always passes."""
    assert share_failed(1.0) == 0.0
    assert share_failed(0.9) == 0.0


def test_a_median_beyond_the_limit_is_not_enough() -> None:
    """A median above the limit is not "slower" when the interval reaches below 1."""
    verdict = judge("c", {"s": [1.2, 0.8, 1.2, 0.8, 1.2, 1.2]}, {"s": [1.0] * 6})[0]

    assert verdict.ratio.mid > LIMIT
    assert not verdict.slower


def test_an_overtaken_baseline_hides_what_it_was_overtaken_by() -> None:
    """`hidden` reports the slowdown that a baseline half as fast would let pass."""
    rng = random.Random("overtaken")
    halved = verdict_of(*noisy_pairs(0.5, rng, 12))
    planted = verdict_of(*noisy_pairs(0.55, rng, 12))

    assert not planted.suspect
    assert halved.faster
    assert planted.faster
    assert hidden([halved]) == pytest.approx(2.0, rel=0.05)
    assert hidden([halved, planted]) == hidden([halved])


@pytest.mark.parametrize("now", [[1.0] * 6, [0.97] * 6, [0.8, 1.2, 0.8, 0.8, 1.2, 0.8], [1.1] * 6])
def test_a_baseline_that_is_not_clearly_overtaken_hides_nothing(now: list[float]) -> None:
    """`hidden` is 1 for equal, slightly faster, noisily faster and slower code."""
    assert hidden([verdict_of(now, [1.0] * 6)]) == 1.0


def test_other_metadata_is_named() -> None:
    """Each difference between a stored baseline and this machine is named."""
    stored = {"model": "S", "versions": {"torch": "2.12.0"}}

    differences = mismatches(stored, {"model": "S", "versions": {"torch": "2.13.0"}, "threads": 2})

    assert differences == [
        "versions: the baseline has {'torch': '2.12.0'}, here it is {'torch': '2.13.0'}",
        "threads: the baseline has None, here it is 2",
    ]


def test_a_planted_slowdown_is_one() -> None:
    """A step of 10 ms slowed by 1.10 takes 11 ms and returns the same value."""
    clock, ticks = FakeClock(), []

    def tick() -> float:
        ticks.append(clock.now)
        clock.now += 0.0001  # looking at the clock takes time too
        return clock.now

    def step(value: int) -> int:
        clock.now += 0.010
        return value

    result = slowed(step, 1.10, tick)(7)

    assert result == 7
    assert clock.now == pytest.approx(0.011, abs=0.0005)


# -- the stopwatch -------------------------------------------------------------------------------


def test_time_belongs_to_the_innermost_part() -> None:
    """Time inside the cache is not counted again for the scheduler that called it."""
    clock = FakeClock()

    class Cache:
        def match(self) -> None:
            clock.now += 3.0

        @property
        def num_free(self) -> int:
            clock.now += 1.0
            return 5

    class Scheduler:
        def __init__(self) -> None:
            self.cache = Cache()

        def schedule(self) -> int:
            clock.now += 1.5
            self.cache.match()
            clock.now += 0.5
            return self.cache.num_free

    watch = Stopwatch(clock)
    watch.measure("cache", Cache)
    watch.measure("scheduler", Scheduler)

    free = Scheduler().schedule()

    assert free == 5
    assert watch.spent(10.0) == {
        "cache": 4.0, "planner": 0.0, "scheduler": 2.0, "execute": 0.0, "other": 4.0,
    }  # fmt: skip


def test_a_part_that_raises_is_left() -> None:
    """A measured call that raises still stops its timer."""
    clock = FakeClock()

    class Cache:
        def fail(self) -> None:
            clock.now += 1.0
            raise ValueError(self)

    watch = Stopwatch(clock)
    watch.measure("cache", Cache)

    with pytest.raises(ValueError, match="Cache"):
        Cache().fail()
    clock.now += 5.0

    assert watch.spent(6.0)["cache"] == 1.0


# -- tables --------------------------------------------------------------------------------------


def test_ratios_refer_to_the_fastest_peer() -> None:
    """Ratios ignore our own variants and peers without a figure."""
    cells = [
        cell("ramify", 1.0, 1.0, 2.0),
        cell("ramify-off", 0.5, 0.5, 0.5),
        cell("slow", 9.0, 9.0, 9.0),
        cell("fast", 2.0, 3.0, 4.0),
        cell("gone", failed="over 100 s"),
    ]

    best = best_peer(cells)

    assert best is cells[3]
    assert ratios(best, cells[0]) == [2.0, 3.0, 2.0]


def test_the_table_tells_what_was_not_measured_and_how_often_the_rest_was() -> None:
    """The table shows spread, repetitions, ratio, roofline and which engines were too slow."""
    cells = [cell("ramify", 1.0, 2.0, 3.0), cell("peer", 4.0, 4.0), cell("gone", failed="over 9 s")]

    lines = table(cells, roofline_s=0.5).splitlines()

    assert "| ramify | 2.00 (1.00–3.00; 3) | 4.00 | 3.00 (2.00–4.00) | 1 |" in lines[4]
    assert "| peer | 4.00 (4.00–4.00; 2) | 8.00 | best peer |" in lines[5]
    assert lines[6].startswith("| gone | over 9 s |")
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_answers_are_compared_one_by_one() -> None:
    """The share of equal answers is reported: 50 % when half agree."""
    mine, theirs = cell("ramify", 1.0), cell("transformers", 1.0)
    mine.samples[0]["tokens"] = [[1, 2], [3, 4]]
    theirs.samples[0]["tokens"] = [[1, 2], [3, 5]]

    assert mine.equal_answers(theirs) == (1, 2)


def test_shares_of_a_step_are_medians_of_its_own_wall_time() -> None:
    """Shares of cache and planner are medians over repetitions of time divided by wall time."""
    watched = cell("ramify-watched", 10.0, 20.0, 10.0)
    for sample, cache_s in zip(watched.samples, (0.1, 0.4, 0.2), strict=True):
        sample["facts"] = {"cache_s": cache_s, "planner_s": 0.0}

    assert inside(watched) == pytest.approx(0.02)
