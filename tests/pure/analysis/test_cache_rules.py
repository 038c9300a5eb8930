"""Cache rules of providers, by small examples from their documentation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.analysis.providers import CacheModel, load_rules, prompts_of
from ramify.analysis.records import HashedPrompt, LoggedRequest
from tests.budget import examples
from tests.pure.analysis.replay_prompts import Block, corpus_of, predict, request_of, tokens

MINUTE = 60.0


def reads(provider: str, requests: list[LoggedRequest]) -> list[int]:
    return [item.billed.num_read for item in predict(provider, requests)]


def test_openai_reads_128_steps_from_1024_on() -> None:
    """gpt-4o: 1,300 equal tokens read 1,280; 1,023 equal tokens read nothing."""
    shared = Block(tokens(0, 1300))
    short = Block(tokens(9000, 1023))
    log = [
        request_of([shared, Block(tokens(2000, 50))], model="gpt-4o"),
        request_of([shared, Block(tokens(3000, 50))], model="gpt-4o"),
        request_of([short, Block(tokens(4000, 50))], model="gpt-4o"),
        request_of([short, Block(tokens(5000, 50))], model="gpt-4o"),
    ]

    assert reads("openai", log) == [0, 1280, 0, 0]


def test_vllm_computes_at_least_the_last_token() -> None:
    """An equal prompt of 64 tokens reads 48: the page with the last token is computed."""
    log = [request_of([Block(tokens(0, 64))], model="m")] * 2

    assert reads("vllm", log) == [0, 48]


def test_sglang_reads_all_but_one_token() -> None:
    """Page size 1: an equal prompt of 64 tokens reads 63, a prompt with 40 equal tokens 40."""
    log = [
        request_of([Block(tokens(0, 64))], model="m"),
        request_of([Block(tokens(0, 64))], model="m"),
        request_of([Block((*tokens(0, 40), 99, 98))], model="m"),
    ]

    assert reads("sglang", log) == [0, 63, 40]


def test_answers_are_read_as_part_of_the_next_prompt() -> None:
    """An engine has the pages of an answer once it has ended."""
    question, answer = Block(tokens(0, 64)), Block(tokens(100, 64))
    log = [
        request_of([question], model="m", start=0.0, first=1.0, end=5.0, output=[answer]),
        request_of([question, answer, Block((7,))], model="m", start=3.0, first=3.5),
        request_of([question, answer, Block((8,))], model="m", start=6.0, first=6.5),
    ]

    assert reads("vllm", log) == [0, 64, 128]


@st.composite
def token_logs(draw: st.DrawFn) -> list[tuple[tuple[int, ...], float, float]]:
    """Prompts that extend, cut and edit earlier prompts, with starts and first outputs."""
    prompts: list[tuple[int, ...]] = []
    log, now = [], 0.0
    for _ in range(draw(st.integers(1, 14))):
        base = draw(st.sampled_from(prompts)) if prompts else ()
        base = base[: draw(st.integers(0, len(base)))]
        new = draw(st.lists(st.integers(0, 2), max_size=3)) + [0] * draw(st.integers(0, 70))
        prompt = (*base, *new)
        prompts.append(prompt)
        now += draw(st.sampled_from([0.0, 1.0, 5.0, 400.0, 1000.0]))
        log.append((prompt, now, now + draw(st.sampled_from([0.0, 2.0, 7.0]))))
    return log


def direct_grid(
    log: list[tuple[tuple[int, ...], float, float]], step: int, lifetime: float, reserve: int
) -> list[int]:
    """Every prefix in a dictionary with the times of its entry."""
    entries: dict[tuple[int, ...], tuple[float, float]] = {}  # ready, last use
    counts = []
    for prompt, start, first in log:
        read = 0
        prefixes = [prompt[:end] for end in range(step, len(prompt) + 1, step)]
        for prefix in prefixes:
            ready, used = entries.get(prefix, (float("inf"), 0.0))
            if ready > start or start >= used + lifetime:
                break
            read = len(prefix)
        counts.append(min(read, (len(prompt) - reserve) // step * step))
        for prefix in prefixes:
            ready, used = entries.get(prefix, (float("inf"), float("-inf")))
            if start >= used + lifetime:
                entries[prefix] = (first, first)
            else:
                entries[prefix] = (min(ready, first), max(used, start))
    return counts


@given(token_logs(), st.sampled_from([("sglang", 1, 1), ("vllm", 16, 1)]))
@settings(max_examples=examples(150), deadline=None)
def test_grid_equals_a_dictionary_of_all_prefixes(
    log: list[tuple[tuple[int, ...], float, float]], engine: tuple[str, int, int]
) -> None:
    """Coarse and fine hashes give what every prefix in a dictionary gives, parallel requests too."""
    provider, step, reserve = engine
    requests = [
        request_of([Block(prompt)] if prompt else [], model="m", start=start, first=first)
        for prompt, start, first in log
    ]

    assert reads(provider, requests) == [
        max(0, count) for count in direct_grid(log, step, float("inf"), reserve)
    ]


@given(token_logs(), st.sampled_from([1, 16]))
@settings(max_examples=examples(150), deadline=None)
def test_grid_with_a_lifetime_equals_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory,
    log: list[tuple[tuple[int, ...], float, float]],
    step: int,
) -> None:
    """Entries expire after their last use, whether hashes are coarse or fine."""
    rules = tmp_path_factory.mktemp("rules") / "rules.json"
    rules.write_text(
        '{"schema": 1, "date": "2026-01-01", "providers": {"x": {"defaults": '
        f'{{"cache": "grid", "step_tokens": {step}, "lifetimes_s": [600]}}}}}}}}'
    )
    requests = [
        request_of([Block(prompt)] if prompt else [], model="m", start=start, first=first)
        for prompt, start, first in log
    ]

    reads = [item.billed.num_read for item in predict("x", requests, rules)]

    assert reads == direct_grid(log, step, 600.0, 0)


def test_hashed_prompts_read_full_blocks() -> None:
    """Equal leading ids of full blocks are read; the partial last block is not."""
    log = [
        LoggedRequest("t", 1, hashed=HashedPrompt(512, (1, 2, 3), 1100)),
        LoggedRequest("t", 2, hashed=HashedPrompt(512, (1, 2, 4), 1300)),
        LoggedRequest("t", 3, hashed=HashedPrompt(512, (1, 2, 3), 1100)),
    ]

    assert reads("ramify", log) == [0, 1024, 1024]


def anthropic_turns(gaps: list[float]) -> list[LoggedRequest]:
    """A conversation with a breakpoint at its last message; 2,000 tokens a turn."""
    log, now = [], 0.0
    for turn, gap in enumerate(gaps, 1):
        now += gap
        blocks = [Block(tokens(10_000 * at, 2000)) for at in range(turn)]
        blocks[-1] = replace(blocks[-1], ttl=300.0)
        log.append(request_of(blocks, start=now, first=now + 1, line=turn))
    return log


def test_anthropic_reads_what_the_last_turn_wrote() -> None:
    """Each turn reads the turn before and writes its own part, at 1.25 of the price."""
    first, second, third = predict("anthropic", anthropic_turns([0, MINUTE, 4 * MINUTE]))

    assert (first.billed.num_read, first.billed.num_written) == (0, 2000)
    assert (second.billed.num_read, second.billed.num_written) == (2000, 2000)
    assert (third.billed.num_read, third.billed.num_written) == (4000, 2000)
    assert third.billed.num_ordinary == 0


def test_anthropic_entries_expire_after_five_minutes() -> None:
    """A gap of six minutes reads nothing, and says that the entry has expired."""
    _, second = predict("anthropic", anthropic_turns([0, 6 * MINUTE]))

    assert second.billed.num_read == 0
    assert (second.read_if_kept, second.expired) == (2000, 0)


def test_anthropic_parallel_requests_all_write() -> None:
    """Nothing is read before the writer's response has begun."""
    log = [anthropic_turns([0])[0]] * 2

    first, second = predict("anthropic", log)

    assert [first.billed.num_written, second.billed.num_written] == [2000, 2000]
    assert (second.read_if_ready, second.in_flight) == (2000, 0)


def test_anthropic_below_the_minimum_writes_nothing() -> None:
    """512 tokens are too few for Haiku 4.5, enough for Opus 5."""
    block = Block(tokens(0, 600), ttl=300.0)
    for model, expected in [("claude-haiku-4-5", 0), ("claude-opus-5", 600)]:
        log = [request_of([block], model=model)] * 2

        first, second = predict("anthropic", log)

        assert first.billed.num_written == second.billed.num_read == expected
        assert second.read_if_long_enough == 600


def test_anthropic_looks_back_twenty_positions() -> None:
    """19 blocks after the last breakpoint still read, 20 do not; a run of tool results is one block."""
    head = Block(tokens(0, 2000), ttl=300.0)
    for count, role, expected in [(19, "user", 2000), (20, "user", 0), (20, "tool", 2000)]:
        tail = [
            Block(
                (),
                role=role,
                text=f'{{"type":"{"tool_result" if role == "tool" else "x"}","n":{n}}}',
            )
            for n in range(count)
        ]
        tail[-1] = replace(tail[-1], ttl=300.0)
        log = [request_of([head]), request_of([replace(head, ttl=None), *tail])]

        _, second = predict("anthropic", log)

        assert second.billed.num_read == expected
        assert second.read_if_in_reach == 2000


def test_anthropic_mixed_lifetimes_are_billed_apart() -> None:
    """Read up to A, hour-long writes up to B, five-minute writes up to C, the rest is ordinary."""
    log = [
        request_of(
            [
                Block(tokens(0, 1500), kind="tool", ttl=3600.0),
                Block(tokens(2000, 1500), kind="system", ttl=3600.0),
                Block(tokens(4000, 700), ttl=300.0),
                Block(tokens(6000, 33)),
            ],
            model="claude-opus-5",
        )
    ]
    log.append(replace(log[0], segments=(*log[0].segments[:2], *log[0].segments[3:])))

    first, second = (item.billed for item in predict("anthropic", log))

    assert (first.num_written, first.num_written_1h, first.num_ordinary) == (3700, 3000, 33)
    assert first.money == pytest.approx((33 * 5 + 700 * 6.25 + 3000 * 10) / 1e6)
    assert (second.num_read, second.num_written, second.num_written_1h) == (1500, 700, 0)
    assert second.money == pytest.approx((1500 * 0.5 + 700 * 6.25 + 33 * 5) / 1e6)


@pytest.mark.parametrize(
    ("name", "expected"), [("tool_choice", 4000), ("speed", 2000), ("model", 0), ("metadata", 6000)]
)
def test_anthropic_settings_lose_their_level(name: str, expected: int) -> None:
    """tool_choice keeps tools and system, speed keeps tools, another model keeps nothing."""
    blocks = [
        Block(tokens(0, 2000), kind="tool", ttl=300.0),
        Block(tokens(3000, 2000), kind="system", ttl=300.0),
        Block(tokens(6000, 2000), ttl=300.0),
    ]
    before = request_of(blocks, settings={name: "a"} if name != "model" else None)
    after = request_of(
        blocks,
        settings={name: "b"} if name != "model" else None,
        model="claude-opus-4-1" if name == "model" else "claude-sonnet-4-5",
    )

    _, second = predict("anthropic", [before, after])

    assert second.billed.num_read == expected


def test_new_openai_models_read_at_user_messages() -> None:
    """gpt-6 writes at the latest user message, and finds it however long ago it was the latest."""
    head = Block(tokens(0, 1500), kind="system")

    def user(turn: int) -> Block:
        return Block((), role="user", text=f'{{"turn":{turn},"text":"{"word " * 300}"}}')

    answer = Block((), role="assistant", text='{"text":"yes"}')
    log = [
        request_of([head, user(0)], model="gpt-6-sol"),
        request_of([head, user(0), answer, user(1)], model="gpt-6-sol"),
        request_of([head, user(0), answer, user(1), answer, user(2)], model="gpt-6-sol"),
    ]

    first, second, third = (item.billed for item in predict("openai", log))

    assert first.num_written == first.num_input
    assert second.num_read == first.num_input
    assert third.num_read == second.num_input
    assert third.num_written == third.num_input - third.num_read
    assert first.money == pytest.approx(first.num_input * 2.5 / 1e6)


def test_deepseek_reads_whole_units_only() -> None:
    """After A+B, A+C reads nothing; then A+D reads A, rounded down to 64 tokens."""
    a = Block(tokens(0, 700))
    log = [
        request_of([a, Block(tokens(1000 * at, 300))], model="deepseek-v4-pro") for at in (1, 2, 3)
    ]
    log.append(request_of([a, Block(tokens(3000, 300)), Block((7,))], model="deepseek-v4-pro"))

    assert reads("deepseek", log) == [0, 0, 640, 960]


def test_a_mixed_log_has_each_provider_s_rule() -> None:
    """Without a named provider, gpt-4o reads steps of 128 and Claude up to its breakpoint."""
    block = Block(tokens(0, 1300), ttl=300.0)
    corpus = corpus_of([request_of([block], model=m) for m in ["gpt-4o", "claude-opus-5"] * 2])

    model = CacheModel.of_log(corpus, load_rules())

    assert [item.billed.num_read for item in model.replay(prompts_of(corpus))] == [0, 0, 1280, 1300]
