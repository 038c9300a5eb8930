"""Logs with planted causes of lost hits, and the truth about each request.

Imports nothing of the analyser: prompts, bodies, segments, matches and causes are the generator's own.
A log is made of cells: an app with up to three plants, whose conversations are interleaved with those
of other cells. `PlantedLog.truth` compares requests as the contract of `lint` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tests.pure.analysis import planted_bodies as bodies
from tests.pure.analysis import planted_causes as causes
from tests.pure.analysis import planted_hidden as hidden
from tests.pure.analysis import planted_prompts as prompts
from tests.pure.analysis import planted_slots as slots
from tests.pure.analysis import planted_words as words
from tests.pure.analysis.planted_bodies import Body, Piece
from tests.pure.analysis.planted_prompts import App, Part, Prompt
from tests.pure.analysis.planted_slots import Change, Moment, Plant
from tests.pure.analysis.planted_truth import (
    TrueDivergence,
    divergence_of,
    first_differing,
    shared_chars,
)
from tests.pure.analysis.planted_words import Rng

BODY_OF: dict[str, Callable[[Prompt], Body]] = {
    "chat": bodies.chat_body,
    "responses": bodies.responses_body,
    "anthropic": bodies.anthropic_body,
    "otlp": bodies.otlp_fields,
}
MODELS = {
    "chat": ("gpt-4.1", "gpt-4.1-mini"),
    "responses": ("gpt-5.1", "gpt-5.1-mini"),
    "anthropic": ("claude-sonnet-4-5", "claude-opus-4-1"),
    "otlp": ("gpt-4.1", "gpt-4.1-mini"),
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"tool_choice": "required"},
        {"reasoning_effort": "high"},
        {"response_format": {"type": "json_object"}},
        {"parallel_tool_calls": False},
        {"verbosity": "low"},
    ],
    "responses": [
        {"reasoning": {"effort": "high"}},
        {"text": {"format": {"type": "json_object"}}},
        {"tool_choice": "none"},
    ],
    "anthropic": [
        {"tool_choice": {"type": "any"}},
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        {"output_config": {"effort": "low"}},
    ],
    "otlp": [],
}
SAMPLING: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0}, {"top_p": 0.9}]

EVERY = ("agent", "chat", "rag", "few_shot", "vision", "thinker")
KINDS: dict[str, tuple[str, ...]] = {
    "clock": EVERY,
    "random_id": EVERY,
    "path_or_state": EVERY,
    "billing_header": EVERY,
    "tool_order": ("agent", "thinker"),
    "tool_changed": ("agent", "thinker"),
    "key_order": ("agent", "thinker"),
    "whitespace": EVERY,
    "settings_changed": EVERY,
    "model_changed": EVERY,
    "media_changed": ("vision",),
    "history_edited": ("agent", "chat"),
    "compaction": ("agent", "chat"),
    "reasoning_dropped": ("thinker",),
    "context_moved": ("chat", "rag", "agent"),
    "system_hoisted": ("chat", "rag"),
    "cache_key_scattered": EVERY,
    "namespace_split": ("chat", "rag", "agent", "few_shot"),
}
HIDING = frozenset({"history_edited", "reasoning_dropped"})
LEGITIMATE = frozenset({"compaction", "new_content", "outside_prompt"})
HISTORY = frozenset(
    "history_edited compaction reasoning_dropped context_moved system_hoisted media_changed".split()
)
SCOPE = frozenset("model_changed cache_key_scattered namespace_split".split())
SCOPE_PATHS = {
    "cache_key_scattered": "settings.prompt_cache_key",
    "namespace_split": "settings.cache_salt",
}
UNSEEN = {  # by a log of this API
    "chat": frozenset(),
    "responses": frozenset({"namespace_split"}),
    "anthropic": frozenset({"namespace_split", "cache_key_scattered"}),
    "otlp": frozenset({"namespace_split", "cache_key_scattered", "settings_changed"}),
}
PAGE_CHARS = (0, 64, 512)  # tie breaking knows pages, this module counts code points
SLACK_CHARS = 24  # within which two raw prefixes may have as many tokens
UNRELATED_CHARS = 400  # whoever shares less has another app


Mended = Mapping[str, Container[int]]  # by cause, the cells in which it is mended


@dataclass(slots=True)
class PlantedRequest:
    """A request of a planted log: the clean prompt, and what the plants make of it."""

    number: int
    cell: int
    conversation: int
    turn: int
    start_s: float
    end_s: float
    api: str
    clean: Prompt
    changes: dict[str, tuple[str, Change]]  # place → cause, change
    clean_slots: dict[str, str]
    sampling: dict[str, Any] = field(default_factory=dict)
    _cache: dict[frozenset[str], tuple[Body, list[Piece], tuple[str, ...]]] = field(
        default_factory=dict
    )

    def prompt(self, places: Collection[str], shown: Collection[str] | None = None) -> Prompt:
        """The prompt if only these places are left as sent.

        With `shown`, a mended place has back what it hid only as far as that is shown in the log.
        """
        prompt = self.clean
        for place, (cause, change) in self.changes.items():
            before = prompt
            prompt = (change.sent if place in places else change.mended)(prompt)
            if shown is not None and cause in HIDING and place not in places:
                prompt = hidden.restore(change.sent(before), prompt, shown)
        return slots.fill_slots(prompt, self.clean_slots)

    def render(self, places: Collection[str]) -> tuple[Body, list[Piece], tuple[str, ...]]:
        """Body, segments and cache scope if only these places are left as sent."""
        key = frozenset(place for place in self.changes if place in places)
        if key not in self._cache:
            prompt = self.prompt(key)
            body = BODY_OF[self.api](prompt)
            scope = (prompt.cache_key or "", prompt.salt or "")
            self._cache[key] = (body, bodies.pieces_of(body), scope)
        return self._cache[key]

    @property
    def sent(self) -> Body:
        """The body in the log."""
        return self.render(self.changes)[0]


@dataclass(frozen=True, slots=True)
class Truth:
    """What `lint` has to say about a request, compared with one earlier request."""

    divergence: TrueDivergence | None
    causes: dict[str, frozenset[str]]  # cause → segments that may be named
    likely: frozenset[str]  # causes that text cannot prove
    shared_chars: int  # clean
    raw_chars: int
    is_unrelated: bool


@dataclass(slots=True)
class PlantedLog:
    """Requests in order of start."""

    requests: list[PlantedRequest]
    api: str
    has_times: bool

    def mended_bodies(self, mended: Mended, *, as_shown: bool = False) -> Iterator[Body]:
        """The bodies with causes mended.

        With `as_shown`, without what no request before and no request itself has in its prompt: a
        tool result that was cleared at once, reasoning that was never sent back.
        """
        shown: dict[tuple[int, int], set[str]] = {}
        for request in self.requests:
            kept = [
                place
                for place, (cause, _) in request.changes.items()
                if request.cell not in mended.get(cause, ())
            ]
            if not as_shown:
                yield request.render(kept)[0]
                continue
            known = shown.setdefault((request.cell, request.conversation), set())
            sent = request.clean
            for cause, change in request.changes.values():
                sent = change.sent(sent) if cause in HIDING else sent
            known |= hidden.names_of_shown(request.clean, sent)
            yield BODY_OF[request.api](request.prompt(kept, known))

    def candidates(self, number: int) -> tuple[list[int], int | None]:
        """Earlier requests that may be called the best match, and the strict choice."""
        request = self.requests[number]
        _, clean, _ = request.render(())
        _, sent, _ = request.render(request.changes)
        legitimate = [place for place, (cause, _) in request.changes.items() if cause in LEGITIMATE]
        allowed: set[int] = set()
        strict: int | None = None
        scores: dict[int, tuple[int, int]] = {}
        for earlier in self.requests[:number]:
            if self.has_times and earlier.end_s > request.start_s:
                continue
            mended = shared_chars(clean, earlier.render(())[1])
            scores[earlier.number] = (
                mended,
                shared_chars(sent, earlier.render(earlier.changes)[1]),
            )
        for kept in [[], legitimate] if legitimate else [[]]:
            if kept:
                mine = request.render(kept)[1]
                mended_of = {
                    n: shared_chars(mine, self.requests[n].render(kept)[1]) for n in scores
                }
            else:
                mended_of = {n: mended for n, (mended, _) in scores.items()}
            best = max(mended_of.values(), default=0)
            for page in PAGE_CHARS:
                tied = [n for n in scores if mended_of[n] >= best - page]
                longest = max((scores[n][1] for n in tied), default=0)
                top = [n for n in tied if scores[n][1] >= longest - SLACK_CHARS]
                allowed.update(top)
                if top and strict is None:
                    strict = max(top)
        return sorted(allowed), strict

    def truth(self, number: int, match: int | None) -> Truth:
        """The contract's answer for a request and its best match."""
        if match is None:
            return Truth(None, {}, frozenset(), 0, 0, is_unrelated=True)
        mine, other = self.requests[number], self.requests[match]
        sent, other_sent = mine.render(mine.changes), other.render(other.changes)
        places = dict(other.changes) | dict(mine.changes)
        # What is legitimate is not mended: a cause behind it shows only where both prompts have it.
        kept = {place for place, (cause, _) in places.items() if cause in LEGITIMATE}
        divergence = divergence_of(sent[1], other_sent[1])
        clean = shared_chars(mine.render(())[1], other.render(())[1])
        is_unrelated = clean < UNRELATED_CHARS or mine.cell != other.cell
        causes: dict[str, frozenset[str]] = {}
        for place, (cause, _) in places.items():
            if divergence is None and sent[2] == other_sent[2]:
                break  # a next turn has no cause
            base = kept - {place}
            left, right = mine.render(base | {place}), other.render(base | {place})
            renders = mine.render(base)[1], other.render(base)[1]
            is_split = left[2] != right[2]
            alone = divergence_of(left[1], right[1])
            if cause == "compaction":
                # What it replaced is in neither prompt: the summary itself has to be what differs.
                summary = divergence_of(left[1], renders[0])
                if summary and alone and summary.paths & alone.paths:
                    causes[cause] = causes.get(cause, frozenset()) | alone.paths
                continue
            if not is_split and shared_chars(left[1], right[1]) >= shared_chars(*renders):
                continue
            # Equal values shorten what is shared, and diverge nowhere, or at the same content.
            contents = first_differing(left[1], right[1])
            if not is_split and (alone is None or contents == first_differing(*renders)):
                continue
            segments = alone.paths if alone else frozenset()
            if is_split and cause in SCOPE_PATHS:
                segments = frozenset({SCOPE_PATHS[cause]})
            causes[cause] = causes.get(cause, frozenset()) | segments
        if is_unrelated:
            causes = {}
        likely = frozenset({"key_order"} if self.api == "anthropic" else ())
        return Truth(
            divergence=divergence,
            causes=causes,
            likely=likely & causes.keys(),
            shared_chars=clean,
            raw_chars=shared_chars(sent[1], other_sent[1]) if sent[2] == other_sent[2] else 0,
            is_unrelated=is_unrelated,
        )


def _plant(rng: Rng, app: App, cause: str, place: str, api: str) -> Plant:
    if cause == "settings_changed":
        return causes.settings_changed(rng, app, place, SETTINGS[api])
    if cause == "model_changed":
        return causes.model_changed(rng, app, place, MODELS[api][1])
    module = slots if hasattr(slots, cause) else causes
    make: Callable[[Rng, App, str], Plant] = getattr(module, cause)
    return make(rng, app, place)


def _choose_causes(rng: Rng, first: str, api: str) -> tuple[list[str], str]:
    """One to three causes with `first` among them, and a kind of app that all fit."""
    chosen, kinds = [first], set(KINDS[first])
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        more = rng.choice([name for name in KINDS if name not in UNSEEN[api]])
        for group in (HISTORY, SCOPE):
            if more in group and group & set(chosen):
                break
        else:
            if more not in chosen and kinds & set(KINDS[more]):
                chosen.append(more)
                kinds &= set(KINDS[more])
    rng.shuffle(chosen)
    return chosen, rng.choice(sorted(kinds))


def _conversations(rng: Rng, app: App, num_requests: int, decoy: str) -> list[list[Prompt]]:
    """Prompts of an app's conversations, with legitimate differences between them."""
    out: list[list[Prompt]] = []
    while sum(map(len, out)) < num_requests:
        own = replace_app(app)
        if decoy == "names":
            own.prompt = replace(
                app.prompt, system=(*app.prompt.system[:-1], _named(rng, app.prompt.system[-1]))
            )
        if decoy == "tools" and app.prompt.tools:
            number = rng.randrange(1, len(app.prompt.tools) + 1)
            own.prompt = replace(app.prompt, tools=app.prompt.tools[:number])
        turns = 1 if app.is_single_turn else rng.randrange(4, 8)
        made = prompts.conversation(rng, own, turns, clock=len(out))
        if out and decoy == "same_question" and app.kind == "agent":
            made = _asked_again(rng, out[0])
        if decoy == "edit":
            made.append(_edited(rng, made[-1]))
        if decoy == "retry":
            made.append(made[-1])
        out.append(made)
    return out


def replace_app(app: App) -> App:
    """A copy of an app."""
    return App(app.kind, app.prompt, app.shots, app.documents, app.preamble)


def _named(rng: Rng, system: str) -> str:
    return f"{system}\n\nThe user's name is {words.name(rng)} and the locale is {rng.choice(['de', 'en', 'pt'])}."


def _edited(rng: Rng, prompt: Prompt) -> Prompt:
    last = prompt.messages[-1]
    parts = (replace(last.parts[0], text=prompts.question(rng)), *last.parts[1:])
    return replace(prompt, messages=(*prompt.messages[:-1], replace(last, parts=parts)))


def _asked_again(rng: Rng, first: list[Prompt]) -> list[Prompt]:
    """The same conversation another day: tool results say another time."""

    def later(part: Part) -> Part:
        if part.kind != "result":
            return part
        return replace(
            part,
            text=part.text + f"\nas of 2026-11-{rng.randrange(1, 29):02d}T0{rng.randrange(10)}:00Z",
        )

    messages = [replace(m, parts=tuple(map(later, m.parts))) for m in first[-1].messages]
    return [replace(prompt, messages=tuple(messages[: len(prompt.messages)])) for prompt in first]


Waiting = tuple[int, int, int, Callable[[float, int], PlantedRequest]]
DECOYS = ("", "", "names", "tools", "edit", "retry", "same_question")


def make_log(
    seed: int,
    *,
    num_requests: int = 300,
    api: str = "chat",
    has_times: bool = False,
    alone: str | None = None,
    system_chars: int = 5600,
) -> PlantedLog:
    """A log of about this many requests with every cause that text in this API can prove.

    With `alone`, each cell has this cause and no other.
    """
    rng = random.Random(f"{seed} {api}")
    wanted = [name for name in KINDS if name not in UNSEEN[api] and alone in (None, name)]
    cells: list[list[Waiting]] = []
    rng.shuffle(wanted)
    total = 0
    while total < num_requests:
        number = len(cells)
        first = wanted[number % len(wanted)]
        is_decoy = number % 5 == 4 and alone is None
        chosen, kind = _choose_causes(rng, first, api)
        if alone is not None:
            chosen, kind = [alone], rng.choice(KINDS[alone])
        if is_decoy:
            chosen, kind = [], rng.choice(EVERY)
        if is_decoy:
            wanted.insert(rng.randrange(len(wanted) + 1), wanted.pop(number % len(wanted)))
        cell = _make_cell(rng, number, api, kind, chosen, system_chars)
        total += len(cell)
        cells.append(cell)
    return PlantedLog(
        list(_interleave(rng, cells, pace=4.0 if has_times else 40.0)), api, has_times
    )


def _make_cell(
    rng: Rng, cell: int, api: str, kind: str, chosen: list[str], system_chars: int
) -> list[Waiting]:
    """The requests of a cell, which wait for a time: conversation, turn, order, request at a time."""
    model = MODELS[api][0]
    if "namespace_split" in chosen:
        model = "Qwen/Qwen3-32B"
    app = prompts.make_app(rng, kind, model, system_chars=system_chars)
    app.prompt = replace(
        app.prompt,
        settings=dict(rng.choice([{}, {"tool_choice": "auto"}]))
        if api == "chat" and app.prompt.tools
        else {},
        marks=("tools", "system", "last")[
            0 if app.prompt.tools else 1 : 2 if app.is_single_turn else 3
        ],
    )
    plants = [_plant(rng, app, cause, f"cell {cell} {cause}", api) for cause in chosen]
    decoy = rng.choice(DECOYS) if not plants or rng.random() < 0.3 else ""
    if {"tool_order", "tool_changed"} & set(chosen) and decoy == "tools":
        decoy = ""
    if "history_edited" in chosen and decoy == "same_question":
        decoy = ""  # with results cleared, nobody can tell which of two equal conversations goes on
    talks = _conversations(rng, app, 10, decoy)
    waiting: list[Waiting] = []
    counter = iter(range(10**6))
    seeds = Rng(rng.random())

    def build(talk: int, turn: int, at: float, number: int) -> PlantedRequest:
        lengths = tuple(len(prompt.messages) for prompt in talks[talk][: turn + 1])
        moment = Moment(seeds, at, talk, turn, next(counter), lengths)
        changes = {
            plant.place: (plant.cause, change) for plant in plants if (change := plant.edit(moment))
        }
        return PlantedRequest(
            number, cell, talk, turn, at, at + seeds.uniform(0.4, 0.9), api, talks[talk][turn], changes,
            {plant.place: plant.clean for plant in plants if plant.clean}, seeds.choice(SAMPLING),
        )  # fmt: skip

    for talk, made in enumerate(talks):
        waiting.extend(
            (talk, turn, len(made), partial(build, talk, turn)) for turn in range(len(made))
        )
    return waiting


def _interleave(
    rng: Rng, cells: list[list[Waiting]], *, pace: float, width: int = 5
) -> Iterator[PlantedRequest]:
    """Requests in order of start: turns in order, some cells at a time."""
    at = 1_795_650_000.0 + rng.randrange(10**6)
    if rng.random() < 0.5:
        at -= at % 86400 + 120  # two minutes before midnight
    queues = [
        [[item for item in cell if item[0] == talk] for talk in {item[0] for item in cell}]
        for cell in cells
    ]
    open_cells = queues[:width]
    pending = queues[width:]
    number = 0
    while open_cells:
        queue = rng.choice(open_cells)
        talk = rng.choice(queue[:3])
        at += rng.uniform(0.5, 1.5) * pace
        yield talk.pop(0)[3](round(at, 3), number)
        number += 1
        if not talk:
            queue.remove(talk)
        if not queue:
            open_cells.remove(queue)
            if pending:
                open_cells.append(pending.pop(0))
