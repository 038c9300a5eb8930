"""Savings are differences of replays, not sums of losses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.providers import CacheModel, ReplayPrompt, in_start_order, load_rules
from ramify.analysis.records import LoggedRequest
from ramify.analysis.savings.fixing import Fix
from ramify.analysis.savings.measure import FixReplay
from ramify.analysis.verdicts import CauseName, Saving
from tests.budget import examples
from tests.pure.analysis.replay_prompts import Block, corpus_of, request_of, segment_of, tokens


class FakeFixer:
    """Replaces the unit at a place by a clean one."""

    def __init__(self, corpus: Corpus, clean: dict[str, Block]) -> None:
        self.clean = {
            path: corpus.unit_of(segment_of(block, path)) for path, block in clean.items()
        }

    def mend(self, request: StoredRequest, fixes: Collection[Fix]) -> ReplayPrompt:
        units = request.units.copy()
        for fix in fixes:
            for at, path in enumerate(request.paths):
                if path == fix.segment:
                    units[at] = self.clean[path]
        return replace(ReplayPrompt.of(request), units=units)


def savings_of(
    provider: str,
    log: list[LoggedRequest],
    groups: list[list[Fix]],
    clean: dict[str, Block] | None = None,
) -> list[Saving]:
    corpus = corpus_of([replace(request, line=at) for at, request in enumerate(log, 1)])
    model = CacheModel(corpus, provider, load_rules())
    replay = FixReplay(model, FakeFixer(corpus, clean or {}).mend)
    return [replay.saving(group) for group in groups]


CLOCK = Fix(CauseName.CLOCK, "system[0]")
SECOND = Fix(CauseName.RANDOM_ID, "messages[0]")


def clock_log(count: int = 4, **info) -> list[LoggedRequest]:
    """A system prompt of 2,000 tokens behind a changing block, then a changing message."""
    return [
        request_of(
            [
                Block(tokens(at * 100, 16), kind="system"),
                Block(tokens(50_000, 2000), kind="system", ttl=300.0),
                Block(tokens(90_000 + at * 100, 16)),
                Block(tokens(60_000, 160)),
            ],
            **info,
        )
        for at in range(count)
    ]


CLEAN = {"system[0]": Block(tokens(7, 16), kind="system"), "messages[0]": Block(tokens(17, 16))}


def test_fixes_together_save_more_than_alone() -> None:
    """Behind the clock hides the id: alone it saves nothing, with the clock 176 tokens a request."""
    alone_clock, alone_id, both = savings_of(
        "vllm", clock_log(model="m"), [[CLOCK], [SECOND], [CLOCK, SECOND]], CLEAN
    )

    assert alone_clock.tokens == 3 * 2016
    assert alone_id.tokens == 0
    assert both.tokens == 3 * (2016 + 176 - 16)  # the page with the last token is computed
    assert (both.low, both.high, both.money) == (both.tokens, both.tokens, None)


def test_money_subtracts_what_the_fix_writes() -> None:
    """Opus 5, 5 $/M: before, 4 writes of 2,016 tokens; after, 1 write and 3 reads."""
    (saving,) = savings_of("anthropic", clock_log(model="claude-opus-5"), [[CLOCK]], CLEAN)

    assert saving.tokens == 3 * 2016
    assert saving.money == pytest.approx(3 * 2016 * (6.25 - 0.5) / 1e6)


def test_a_breakpoint_that_is_never_read_costs_money() -> None:
    """Marking prompts that nobody reads again saves no token and loses the write premium."""
    log = [request_of([Block(tokens(at * 9000, 2000))], model="claude-opus-5") for at in range(3)]

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.BREAKPOINT_MISSING, "messages[*]")]])

    assert saving.tokens == 0
    assert saving.money == pytest.approx(-3 * 2000 * 1.25 / 1e6)


def test_dropping_an_unread_breakpoint_saves_its_premium() -> None:
    """Conversations of one request that mark their message pay 1.25 for it."""
    log = [
        request_of([Block(tokens(at * 9000, 2000), ttl=300.0)], model="claude-opus-5")
        for at in range(3)
    ]

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.UNREAD_WRITE, "messages[*]")]])

    assert saving.tokens == 0
    assert saving.money == pytest.approx(3 * 2000 * 1.25 / 1e6)


def test_an_entry_that_another_fix_makes_read_keeps_its_breakpoint() -> None:
    """As sent nobody reads the head's entry, behind a clock: without the clock everybody does."""
    unread = Fix(CauseName.UNREAD_WRITE, "system[1]")

    clock, both = savings_of(
        "anthropic", clock_log(model="claude-opus-5"), [[CLOCK], [CLOCK, unread]], CLEAN
    )

    assert clock.tokens == both.tokens == 3 * 2016


def test_a_dropped_breakpoint_leaves_in_reach_what_it_read() -> None:
    """Questions behind a shared head, each marked: the mark moves to the end of the head."""
    head = Block(tokens(0, 2000), kind="system", ttl=300.0)
    log = [
        request_of([head if at == 0 else replace(head, ttl=None), Block(tokens(9000 * at, 100), ttl=300.0)], model="claude-opus-5")
        for at in range(4)
    ]  # fmt: skip

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.UNREAD_WRITE, "messages[*]")]])

    assert saving.tokens == 0
    assert saving.money == pytest.approx(4 * 100 * 0.25 * 5 / 1e6)


def test_a_breakpoint_at_the_shared_head_saves_its_reads() -> None:
    """Three conversations share a system prompt whose end has no breakpoint."""
    log = [
        request_of(
            [Block(tokens(0, 2000), kind="system"), Block(tokens(9000 * at, 100), ttl=300.0)],
            model="claude-opus-5",
        )
        for at in range(1, 4)
    ]

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.BREAKPOINT_MISSING, "system[0]")]])

    assert saving.tokens == 2 * 2000


def test_steps_within_reach_of_each_other_find_an_old_entry() -> None:
    """45 blocks after the entry, three breakpoints 19 positions apart find it."""
    head = Block(tokens(0, 2000), ttl=300.0)
    tail = [Block(tokens(10_000 + 100 * at, 10)) for at in range(45)]
    tail[-1] = replace(tail[-1], ttl=300.0)
    log = [request_of([head]), request_of([replace(head, ttl=None), *tail])]

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.LOOKBACK_EXCEEDED)]])

    assert saving.tokens == 2000


def test_an_hour_instead_of_five_minutes() -> None:
    """Gaps of ten minutes: each later request reads, and each write costs 2 instead of 1.25."""
    log = [
        request_of(
            [Block(tokens(0, 2000), ttl=300.0)], model="claude-opus-5", start=at, first=at + 1
        )
        for at in (0.0, 600.0, 1200.0)
    ]

    (saving,) = savings_of("anthropic", log, [[Fix(CauseName.TTL_EXPIRED)]])

    assert saving.tokens == 4000
    assert saving.money == pytest.approx(2000 * (3 * 6.25 - 10 - 2 * 0.5) / 1e6)


def test_warming_first_and_one_replica() -> None:
    """Serialised, the second request reads; with one replica, the third does as well."""
    block = Block(tokens(0, 160))
    log = [
        request_of(
            [block, Block((at,) * 16)], model="m", start=start, first=start + 2, replica=name
        )
        for at, (start, name) in enumerate([(0.0, "a"), (1.0, "a"), (9.0, "b")])
    ]
    warm, stick = Fix(CauseName.PARALLEL_COLD), Fix(CauseName.ROUTING)

    results = savings_of("vllm", log, [[warm], [stick], [warm, stick]])

    assert [saving.tokens for saving in results] == [160, 160, 320]


def test_sorted_tools_keep_the_breakpoint_at_the_last_tool() -> None:
    """The fixer moves a tool with its breakpoint to the front; the client still marks the last."""
    first, second = Block(tokens(0, 600), kind="tool"), Block(tokens(5000, 600), kind="tool")
    log = [
        request_of([a, replace(b, ttl=300.0), Block(tokens(9000 * at, 50))], model="claude-opus-5")
        for at, (a, b) in enumerate([(first, second), (second, first)], 1)
    ]
    corpus = corpus_of(log)

    class Sorter:
        def mend(self, request: StoredRequest, fixes: Collection[Fix]) -> ReplayPrompt:
            order = [0, *sorted((1, 2), key=lambda at: request.units[at]), 3]
            marks = dict(request.breakpoints)
            return ReplayPrompt(
                request,
                request.units[order],
                request.paths,
                tuple((at, marks[old]) for at, old in enumerate(order) if old in marks),
            )

    model = CacheModel(corpus, "anthropic", load_rules())
    saving = FixReplay(model, Sorter().mend).saving([Fix(CauseName.TOOL_ORDER, "tools[*]")])

    assert saving.tokens == 1200


def test_a_mended_model_has_its_own_rule() -> None:
    """A request that another model answered falls under the rule of the model that it is mended to."""
    block = Block(tokens(0, 2000), ttl=300.0)
    log = [
        request_of([block], model=model)
        for model in ("claude-opus-5", "claude-haiku-4-5", "claude-opus-5")
    ]
    corpus = corpus_of(log)

    class OneModel:
        def mend(self, request: StoredRequest, fixes: Collection[Fix]) -> ReplayPrompt:
            units = request.units.copy()
            units[0] = corpus.requests[0].units[0]
            return replace(ReplayPrompt.of(request), units=units)

    model = CacheModel(corpus, "anthropic", load_rules())
    saving = FixReplay(model, OneModel().mend).saving(
        [Fix(CauseName.MODEL_CHANGED, "settings.model")]
    )

    assert saving.tokens == 2000


def test_one_key_instead_of_a_key_each() -> None:
    """Newer OpenAI models keep keys apart."""
    text = '{"text":"' + "word " * 1500 + '"}'
    log = [
        request_of([Block((), text=text)], model="gpt-6-sol", cache_key=str(at)) for at in range(3)
    ]

    (saving,) = savings_of("openai", log, [[Fix(CauseName.CACHE_KEY_SCATTERED)]])

    assert saving.tokens > 2 * 1500
    assert saving.low == round(saving.tokens * 0.85)
    assert saving.high == round(saving.tokens * 1.15)


def test_nothing_is_promised_for_what_nobody_can_mend() -> None:
    """Evictions, the vendor's own misses and new content have no saving by replay."""
    fixes = [Fix(CauseName.EVICTED), Fix(CauseName.OUTSIDE_PROMPT), Fix(CauseName.NEW_CONTENT)]

    assert savings_of("vllm", clock_log(model="m"), [fixes]) == [Saving(0, 0, 0, 0.0)]


@st.composite
def varied_logs(draw: st.DrawFn) -> list[LoggedRequest]:
    """Requests of two apps, with a value that may change in front of what they share."""
    log, now = [], 0.0
    for at in range(draw(st.integers(2, 10))):
        app, value = draw(st.integers(0, 1)), draw(st.integers(0, 2))
        now += draw(st.sampled_from([0.5, 30.0, 400.0]))
        log.append(
            request_of(
                [
                    Block((app,) * 40, kind="tool"),
                    Block((value + 5,) * 24, kind="system", ttl=300.0),
                    Block(tokens(100, 1400), ttl=draw(st.sampled_from([None, 300.0]))),
                    Block((at,) * 30, ttl=300.0),
                ],
                model="claude-opus-5",
                start=now,
                first=now + draw(st.sampled_from([0.1, 2.0])),
            )
        )
    return log


@given(varied_logs(), st.sampled_from(["anthropic", "vllm", "sglang", "deepseek"]))
@settings(max_examples=examples(60), deadline=None)
def test_a_partial_replay_equals_a_replay_of_all(log: list[LoggedRequest], provider: str) -> None:
    """Parts that share no prefix with a change are left out, and the saving is the same."""
    clean = {"system[0]": Block((77,) * 24, kind="system")}
    corpus = corpus_of(log)
    model = CacheModel(corpus, provider, load_rules())
    fixer = FakeFixer(corpus, clean)
    first = int(corpus.requests[0].units[1])

    class OneApp:
        def mend(self, request: StoredRequest, fixes: Collection[Fix]) -> ReplayPrompt:
            return fixer.mend(request, fixes if request.units[1] == first else [])

    saving = FixReplay(model, OneApp().mend).saving([CLOCK])

    prompts = in_start_order(map(ReplayPrompt.of, corpus))
    after = model.replay([OneApp().mend(prompt.request, [CLOCK]) for prompt in prompts])
    before = model.replay(prompts)
    assert saving.tokens == sum(item.billed.num_read for item in after) - sum(
        item.billed.num_read for item in before
    )
