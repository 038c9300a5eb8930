"""Logs with causes of lost hits that text cannot show, and the truth about each request.

Imports nothing of the analyser. A log is made of stories: an app of its own, whose requests have times,
answers and usage by a second implementation of the vendor's cache rule. A story knows why a request reads
less than it could: the entry expired, was not ready, stands on another replica, was never written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tests.pure.analysis import planted_prompts as prompts
from tests.pure.analysis import planted_words as words
from tests.pure.analysis.planted_bodies import (
    Body,
    anthropic_body,
    chat_body,
    pieces_of,
    responses_body,
)
from tests.pure.analysis.planted_prompts import Message, Part, Prompt, assistant, user
from tests.pure.analysis.planted_words import Rng
from tests.pure.analysis.vendor_oracles import (
    ENGINE_SETTINGS,
    OPENAI_SETTINGS,
    AnthropicOracle,
    Bill,
    Call,
    GridOracle,
    ImplicitOracle,
    Oracle,
    UnitOracle,
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a story; times in seconds from the story's start."""

    prompt: Prompt
    at: float
    wait: float = 1.0  # until the answer begins
    answer: float = 2.0
    causes: frozenset[str] = frozenset()  # that `lint` has to name
    maybe: frozenset[str] = frozenset()  # that it may name
    replica: str = "a"
    answered_by: str | None = None
    is_cold: bool = False  # the server read nothing, whatever the rule says
    story: str = ""


@dataclass(slots=True)
class TimedRequest:
    """A request of a log."""

    sent: Sent
    number: int
    start_s: float
    body: Body
    num_input: int = 0
    bill: Bill = field(default_factory=lambda: Bill(0))


@dataclass(frozen=True, slots=True)
class Vendor:
    """An API with the cache rule of a model: bodies, entries, and the stories that it can tell."""

    model: str
    body: Callable[[Prompt], Body]
    oracle: Callable[[], Oracle]
    lifetime_s: float  # after which no entry is left
    kept_s: float  # within which every entry is
    min_tokens: int
    has_marks: bool = False


VENDORS = {
    "anthropic": Vendor(
        "claude-sonnet-4-5", anthropic_body, lambda: AnthropicOracle(1024), 300.0, 300.0, 1024, True
    ),
    "haiku": Vendor(
        "claude-haiku-4-5", anthropic_body, lambda: AnthropicOracle(4096), 300.0, 300.0, 4096, True
    ),
    "openai": Vendor(
        "gpt-4.1", chat_body,
        lambda: GridOracle(128, 1024, 3600.0, settings=(*OPENAI_SETTINGS, "prompt_cache_key")),
        3600.0, 300.0, 1024,
    ),
    "responses": Vendor(
        "gpt-5.6", responses_body, lambda: ImplicitOracle(OPENAI_SETTINGS), 1800.0, 1800.0, 1024
    ),
    "deepseek": Vendor(
        "deepseek-v4-pro", chat_body, lambda: UnitOracle(("model", "response_format")), 604800.0,
        3600.0, 0,
    ),
    "vllm": Vendor(
        "Qwen/Qwen3-32B", chat_body,
        lambda: GridOracle(16, keeps_one=True, settings=ENGINE_SETTINGS), 1e9, 1e9, 0,
    ),
}  # fmt: skip

Story = Callable[[Rng, Vendor], list[Sent]]


def _app_chars(vendor: Vendor) -> int:
    return max(6000, 7 * vendor.min_tokens)


def _talk(
    rng: Rng, vendor: Vendor, num_turns: int, marks: tuple[str, ...] = ("system", "last")
) -> list[Prompt]:
    """A conversation, each prompt the start of the next."""
    kind = rng.choice(["chat", "agent"])
    app = prompts.make_app(rng, kind, vendor.model, system_chars=_app_chars(vendor))
    app.prompt = replace(app.prompt, marks=marks if vendor.has_marks else ())
    return prompts.conversation(rng, app, num_turns)


def _questions(
    rng: Rng, vendor: Vendor, number: int, marks: tuple[str, ...], chars: int | None = None
) -> list[Prompt]:
    """Prompts of one app, each a conversation of its own."""
    app = prompts.make_app(rng, "chat", vendor.model, system_chars=chars or _app_chars(vendor))
    app.prompt = replace(app.prompt, marks=marks if vendor.has_marks else ())
    return [
        replace(app.prompt, messages=(user(f"{number}: {prompts.question(rng)}"),))
        for number in rng.sample(range(100, 999), number)
    ]


UNREAD = frozenset({"unread_write"})


def steady(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A conversation with short pauses: nothing is lost."""
    at, out = 0.0, []
    for prompt in _talk(rng, vendor, rng.randrange(4, 8)):
        out.append(Sent(prompt, at))
        at += rng.uniform(5, 0.8 * min(vendor.kept_s, 2000.0))
    return out


def pause(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A conversation with a pause over the lifetime, and one just within."""
    talk = _talk(rng, vendor, 6)
    late = rng.randrange(2, 6)
    at, out = 0.0, []
    for number, prompt in enumerate(talk):
        gap = rng.uniform(5, 0.9 * min(vendor.kept_s, 2000.0))
        if number == late:
            gap = vendor.lifetime_s * rng.uniform(1.3, 5)
        at += 0 if not number else gap
        causes = frozenset({"ttl_expired"} if number == late else ())
        out.append(Sent(prompt, at, causes=causes))
    return out


def lucky_pause(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A pause within the range that the vendor publishes, after which all was read: nothing is lost."""
    gap = rng.uniform(700, 3000)
    return [Sent(p, n * gap) for n, p in enumerate(_talk(rng, vendor, 3))]


def unlucky_pause(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A pause within that range, after which nothing was read."""
    gap = rng.uniform(700, 3000)
    return [
        Sent(p, n * gap, is_cold=n > 0, causes=frozenset({"ttl_expired"} if n else ()))
        for n, p in enumerate(_talk(rng, vendor, 3))
    ]


def kept_warm(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A head that other conversations use again and again outlives any pause of its first reader."""
    made = _questions(rng, vendor, 9, ("system",))
    step = 0.7 * min(vendor.kept_s, 2000.0)
    return [Sent(p, step * n) for n, p in enumerate(made)]


def hour_long(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Lifetimes of an hour: half an hour is within, two hours are not."""
    talk = [replace(prompt, ttl="1h") for prompt in _talk(rng, vendor, 4)]
    gaps = (0.0, rng.uniform(400, 3000), rng.uniform(4200, 9000), 60.0)
    return [
        Sent(prompt, sum(gaps[: n + 1]), causes=frozenset({"ttl_expired"} if n == 2 else ()))
        for n, prompt in enumerate(talk)
    ]


def retained(rng: Rng, vendor: Vendor) -> list[Sent]:
    """OpenAI's retention of a day: some hours are within, 30 are not."""
    kept = {"prompt_cache_retention": "24h"}
    gaps = (0.0, rng.uniform(7200, 40_000), rng.uniform(110_000, 150_000), 60.0)
    return [
        Sent(
            replace(p, settings={**p.settings, **kept}), sum(gaps[: n + 1]),
            causes=frozenset({"ttl_expired"} if n == 2 else ()),
        )
        for n, p in enumerate(_talk(rng, vendor, 4))
    ]  # fmt: skip


def retained_in_vain(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Hours within a retention of a day, after which nothing was read: no reason in the log."""
    kept = {"prompt_cache_retention": "24h"}
    return [
        Sent(
            replace(p, settings={**p.settings, **kept}), 9000.0 * n, is_cold=n == 1,
            causes=frozenset({"outside_prompt"} if n == 1 else ()),
        )
        for n, p in enumerate(_talk(rng, vendor, 3))
    ]  # fmt: skip


def fan_out(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Requests that start before the first has begun to answer; two more come when it has."""
    made = _questions(rng, vendor, rng.randrange(5, 8), ("system",))
    wait = rng.uniform(3, 9)
    out = [Sent(made[0], 0.0, wait, 20.0)]
    for prompt in made[1:-2]:
        at = rng.uniform(0.05, 0.9) * wait
        out.append(Sent(prompt, at, wait, causes=frozenset({"parallel_cold"})))
    return [*out, *(Sent(p, wait + rng.uniform(3, 60)) for p in made[-2:])]


def same_question(rng: Rng, vendor: Vendor) -> list[Sent]:
    """One prompt four times at once, and a fifth time when the answers have come."""
    prompt = _talk(rng, vendor, 1)[0]
    cold = frozenset({"parallel_cold"})
    out = [Sent(prompt, 0.3 * n, 4.0, causes=cold if n else frozenset()) for n in range(4)]
    return [*out, Sent(prompt, 30.0)]


def warmed_fan_out(rng: Rng, vendor: Vendor) -> list[Sent]:
    """One request first, the others at the same time when it has answered: nothing is lost."""
    made = _questions(rng, vendor, 5, ("system",))
    out = [Sent(made[0], 0.0, 1.0, 30.0)]  # it has begun to answer, and goes on
    return [*out, *(Sent(p, 10 + 0.1 * n, 5.0) for n, p in enumerate(made[1:]))]


def unmarked_head(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A breakpoint behind the question only: the shared head is written and never read.

    Newer models of OpenAI set it there by themselves.
    """
    made = _questions(rng, vendor, rng.randrange(4, 7), ("last",))
    return [
        Sent(
            prompt, 20.0 * n, maybe=UNREAD,
            causes=frozenset({"breakpoint_missing"} if n else ()),
        )
        for n, prompt in enumerate(made)
    ]  # fmt: skip


def marked_head(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A breakpoint at the end of the shared head: nothing is lost."""
    return [
        Sent(p, 20.0 * n)
        for n, p in enumerate(_questions(rng, vendor, rng.randrange(4, 7), ("system",)))
    ]


def _with_rounds(rng: Rng, prompt: Prompt, rounds: int) -> Prompt:
    """A prompt that goes on by rounds of a call and its result, two positions each."""
    messages = list(prompt.messages)
    for _ in range(rounds):
        call = prompts.call_id(rng)
        name = words.topic(rng)
        arguments = {"query": name}
        messages += [
            Message("assistant", (Part("call", call_id=call, name="look", arguments=arguments),)),
            Message("tool", (Part("result", words.prose(rng, 200), call_id=call),)),
        ]
    return replace(prompt, messages=(*messages, assistant("So far."), user(prompts.question(rng))))


def _rounds(rng: Rng, vendor: Vendor, rounds: int, causes: frozenset[str]) -> list[Sent]:
    first = _talk(rng, vendor, 2, ("last",))[0]
    second = _with_rounds(rng, first, rounds)
    third = replace(second, messages=(*second.messages, assistant("Yes."), user("And then?")))
    return [Sent(first, 0.0), Sent(second, 60.0, causes=causes), Sent(third, 120.0)]


def far_rounds(rng: Rng, vendor: Vendor) -> list[Sent]:
    """More than twenty positions since the last write."""
    return _rounds(rng, vendor, rng.randrange(11, 18), frozenset({"lookback_exceeded"}))


def near_rounds(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Fewer than twenty positions since the last write: nothing is lost."""
    return _rounds(rng, vendor, rng.randrange(3, 8), frozenset())


def short_head(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A marked head of 30 to 70 % of the minimum."""
    chars = int(vendor.min_tokens * rng.uniform(1.2, 2.8))
    made = _questions(rng, vendor, rng.randrange(3, 6), ("system",), chars)
    return [
        Sent(p, 30.0 * n, causes=frozenset({"below_minimum"} if n else ()))
        for n, p in enumerate(made)
    ]


def one_shots(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Prompts that share nothing, each written and never read."""
    made = [_questions(rng, vendor, 1, ("last",))[0] for _ in range(4)]
    return [Sent(p, 90.0 * n, causes=UNREAD) for n, p in enumerate(made)]


def spread(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A conversation whose turns go to two deployments; a later turn on the first reads its own."""
    talk = _talk(rng, vendor, 5)
    replicas = rng.choice(["aabbb", "abbbb", "aaabb"])
    return [
        Sent(
            p, 30.0 * n, replica=replicas[n],
            causes=frozenset({"routing"} if n and replicas[n] != replicas[n - 1] else ()),
        )
        for n, p in enumerate(talk)
    ]  # fmt: skip


def sticky(rng: Rng, vendor: Vendor) -> list[Sent]:
    """Two conversations, each on its own deployment: nothing is lost."""
    return [
        Sent(p, 30.0 * n + 7 * talk, replica="ab"[talk])
        for talk in range(2)
        for n, p in enumerate(_talk(rng, vendor, 4))
    ]


def scattered_keys(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A conversation with a new key for every turn."""
    return [
        Sent(
            replace(p, cache_key=words.uuid4(rng)), 20.0 * n,
            causes=frozenset({"cache_key_scattered"} if n else ()),
        )
        for n, p in enumerate(_talk(rng, vendor, 5))
    ]  # fmt: skip


def busy_key(rng: Rng, vendor: Vendor) -> list[Sent]:
    """30 requests in a minute with one key: from the sixteenth on, some land on a cold machine."""
    made = _questions(rng, vendor, 30, ())
    out = []
    for n, p in enumerate(made):
        is_cold = n >= 16 and rng.random() < 0.4
        causes = frozenset({"cache_key_scattered"} if is_cold else ())
        sent = replace(p, cache_key="app")
        out.append(Sent(sent, 1.9 * n, 0.5, 0.5, causes=causes, is_cold=is_cold))
    return out


def salted(rng: Rng, vendor: Vendor) -> list[Sent]:
    """One app, a salt for every user."""
    return [
        Sent(
            replace(p, salt=words.uuid4(rng)), 20.0 * n,
            causes=frozenset({"namespace_split"} if n else ()),
        )
        for n, p in enumerate(_questions(rng, vendor, 4, ()))
    ]  # fmt: skip


def evicted(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A turn that the engine computes again though it had the pages."""
    late = rng.randrange(2, 5)
    return [
        Sent(
            p, 40.0 * n, is_cold=n == late, causes=frozenset({"evicted"} if n == late else ())
        )
        for n, p in enumerate(_talk(rng, vendor, 6))
    ]  # fmt: skip


def unexplained(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A turn within the lifetime that reads nothing, for no reason in the log."""
    late = rng.randrange(2, 5)
    return [
        Sent(
            p, 40.0 * n, is_cold=n == late,
            causes=frozenset({"outside_prompt"} if n == late else ()),
        )
        for n, p in enumerate(_talk(rng, vendor, 6))
    ]  # fmt: skip


def fallback(rng: Rng, vendor: Vendor) -> list[Sent]:
    """A turn that another model answers, and the next one again the usual."""
    late = rng.randrange(1, 4)
    return [
        Sent(
            p, 40.0 * n, answered_by=f"{vendor.model}-fallback" if n == late else None,
            causes=frozenset({"model_changed"} if n == late else ()), is_cold=n == late,
            maybe=frozenset({"model_changed"}),
        )
        for n, p in enumerate(_talk(rng, vendor, 6))
    ]  # fmt: skip


STORIES: dict[str, tuple[Story, ...]] = {
    "anthropic": (
        steady, pause, kept_warm, hour_long, fan_out, same_question, warmed_fan_out, unmarked_head, marked_head, far_rounds,
        near_rounds, short_head, one_shots, unexplained, fallback,
    ),
    "haiku": (steady, pause, kept_warm, fan_out, unmarked_head, marked_head, short_head, one_shots),
    "openai": (
        steady, pause, retained, retained_in_vain, lucky_pause, unlucky_pause, kept_warm, fan_out, same_question,
        warmed_fan_out, short_head, spread, sticky, scattered_keys,
        busy_key, unexplained, fallback,
    ),
    "responses": (steady, pause, same_question, unmarked_head, one_shots, unexplained),
    "deepseek": (steady, pause, same_question, unexplained),
    "vllm": (steady, fan_out, same_question, warmed_fan_out, spread, sticky, evicted, salted),
}  # fmt: skip


def timed_log(seed: int, vendor_name: str, *, num_requests: int = 200) -> list[TimedRequest]:
    """Requests in order of start, each story told several times, a few at the same time."""
    rng, vendor = Rng(f"{seed} {vendor_name}"), VENDORS[vendor_name]
    starts: list[tuple[float, Sent]] = []
    at, stories = 1_795_650_000.0, list(STORIES[vendor_name])
    while len(starts) < num_requests:
        rng.shuffle(stories)
        for story in stories:
            starts += [
                (round(at + sent.at, 3), replace(sent, story=story.__name__))
                for sent in story(rng, vendor)
            ]
            at += rng.uniform(0, 700)
    starts.sort(key=lambda pair: pair[0])
    requests = [
        TimedRequest(sent, number, start, vendor.body(sent.prompt))
        for number, (start, sent) in enumerate(starts)
    ]
    _bill(rng, vendor, requests)
    return requests


def _bill(rng: Rng, vendor: Vendor, requests: list[TimedRequest]) -> None:
    """Usage by the vendor's rule, in tokens of a tokenizer that `lint` does not have."""
    chars = rng.uniform(3.9, 4.6)
    oracles: dict[str, Oracle] = {}
    for request in requests:
        tokens = {
            piece.path: tuple(_tokens(f"{piece.role}\0{piece.content}", chars))
            for piece in pieces_of(request.body)
            if piece.kind != "setting"
        }
        request.num_input = sum(map(len, tokens.values()))
        sent, start = request.sent, request.start_s
        ready = start + sent.wait
        retention = request.body.get("prompt_cache_retention")
        key = f"{sent.replica} {sent.answered_by} {sent.prompt.salt} {retention}"
        oracle = oracles.setdefault(key, vendor.oracle())
        if isinstance(oracle, GridOracle) and "prompt_cache_retention" in request.body:
            oracle.lifetime_s = 86_400.0
        call = Call(request.body, tokens, start, ready, ready + sent.answer)
        request.bill = oracle.ask(call)
        if sent.is_cold:
            all_written = request.bill.num_read + request.bill.num_written
            has_writes = vendor.has_marks or vendor.model == "gpt-5.6"
            request.bill = Bill(0, all_written if has_writes else 0)


def _tokens(text: str, chars: float) -> Iterator[int]:
    count = max(1, round(len(text) / chars))
    for at in range(count):
        piece = text[round(at * chars) : round((at + 1) * chars)]
        yield zlib.crc32(piece.encode("utf-8", "surrogatepass"))
