"""Causes of lost hits as edits of clean prompts, at a known place and rate. Stdlib only."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.pure.analysis import planted_words as words
from tests.pure.analysis.planted_prompts import App, Message, Part, Prompt, Tool, user
from tests.pure.analysis.planted_slots import Change, Moment, Plant
from tests.pure.analysis.planted_words import Rng


def _sometimes(
    rng: Rng, change: Callable[[Prompt, Moment], Prompt]
) -> Callable[[Moment], Change | None]:
    rate = rng.choice([0.3, 0.5])

    def edit(moment: Moment) -> Change | None:
        if moment.rng.random() >= rate:
            return None
        return Change(lambda prompt: change(prompt, moment))

    return edit


def tool_order(rng: Rng, app: App, place: str) -> Plant:
    def edit(moment: Moment) -> Change | None:
        order = list(range(len(app.prompt.tools)))
        kind = moment.rng.choice(["shuffle", "swap", "rotate", "none"])
        if kind == "none":
            return None
        if kind == "shuffle":
            moment.rng.shuffle(order)
        elif kind == "swap":
            at = moment.rng.randrange(len(order) - 1)
            order[at], order[at + 1] = order[at + 1], order[at]
        else:
            order = order[1:] + order[:1]

        def reorder(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
            return (*(tools[at] for at in order if at < len(tools)), *tools[len(order) :])

        return Change(lambda prompt: replace(prompt, tools=reorder(prompt.tools)))

    return Plant("tool_order", place, edit)


def tool_changed(rng: Rng, app: App, place: str) -> Plant:
    kind = rng.choice(["description", "added", "removed", "schema"])
    name = rng.choice(app.prompt.tools).name
    extra = Tool(
        f"late_{rng.randrange(1000)}_tool",
        words.prose(rng, 120),
        {"type": "object", "properties": {}},
    )
    remark = words.sentence(rng)

    def change(prompt: Prompt) -> Prompt:
        tools = list(prompt.tools)
        at = next((at for at, tool in enumerate(tools) if tool.name == name), len(tools) - 1)
        if kind == "added":
            tools.insert(at, extra)
        elif kind == "removed":
            del tools[at]
        elif kind == "description":
            tools[at] = replace(tools[at], description=f"{tools[at].description} {remark}")
        else:
            schema = json.loads(json.dumps(tools[at].schema))
            schema["properties"][f"extra_{kind}"] = {"type": "string", "description": remark}
            tools[at] = replace(tools[at], schema=schema)
        return replace(prompt, tools=tuple(tools))

    return Plant(
        "tool_changed",
        place,
        lambda moment: Change(change) if moment.turn >= 2 + moment.conversation % 2 else None,
    )


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return [_reversed(item) for item in value]
    return value


def _is_json(text: str) -> bool:
    """Whether a tool's answer is an object and nothing else."""
    return text.startswith("{") and text.endswith("}")


def _map_parts(prompt: Prompt, change: Callable[[Part], Part], until: int | None = None) -> Prompt:
    """Change the parts of messages before `until`."""
    end = len(prompt.messages) if until is None else until
    messages = tuple(
        replace(message, parts=tuple(map(change, message.parts))) if at < end else message
        for at, message in enumerate(prompt.messages)
    )
    return replace(prompt, messages=messages)


def key_order(rng: Rng, app: App, place: str) -> Plant:
    kind = rng.choice(["schema", "arguments", "result"])

    def reorder(part: Part) -> Part:
        if kind == "arguments" and part.kind == "call":
            return replace(part, arguments=_reversed(part.arguments))
        if kind == "result" and part.kind == "result" and _is_json(part.text):
            return replace(
                part, text=json.dumps(_reversed(json.loads(part.text)), ensure_ascii=False)
            )
        return part

    def change(prompt: Prompt, moment: Moment) -> Prompt:
        if kind == "schema":
            return replace(
                prompt,
                tools=tuple(replace(tool, schema=_reversed(tool.schema)) for tool in prompt.tools),
            )
        return _map_parts(prompt, reorder)

    return Plant("key_order", place, _sometimes(rng, change))


def _respace(kind: str, text: str) -> str:
    changes: dict[str, Callable[[str], str]] = {
        "crlf": lambda text: text.replace("\n", "\r\n"),
        "trailing": lambda text: text + " \n",
        "double": lambda text: text.replace(". ", ".  "),
        "nbsp": lambda text: text.replace(", ", ",\u00a0", 1),
        "nfd": lambda text: unicodedata.normalize("NFD", text),
    }
    return changes[kind](text)


def whitespace(rng: Rng, app: App, place: str) -> Plant:
    wheres = ["system"]
    if not app.is_single_turn:
        wheres += ["assistant", "assistant"]
    if app.kind in {"agent", "thinker"}:
        wheres += ["escapes", "indent"]
    where = rng.choice(wheres)
    kind = rng.choice(
        ["crlf", "trailing", "double", "nbsp", "nfd"]
        if where == "system"
        else ["trailing", "double", "nbsp"]
    )
    if kind == "nfd":
        first, rest = app.prompt.system[-1].split("\n\n", 1)
        system = f"{first}\n\nLa réponse reste à l'écran – Grüße, José.\n\n{rest}"
        app.prompt = replace(app.prompt, system=(*app.prompt.system[:-1], system))

    def respace(part: Part, role: str) -> Part:
        if where == "assistant" and role == "assistant" and part.kind == "text":
            return replace(part, text=_respace(kind, part.text))
        if part.kind == "result" and _is_json(part.text):
            value = json.loads(part.text)
            if where == "escapes":
                return replace(part, text=json.dumps(value))
            if where == "indent":
                return replace(part, text=json.dumps(value, ensure_ascii=False, indent=2))
        return part

    def change(prompt: Prompt, moment: Moment) -> Prompt:
        if where == "system":
            return replace(prompt, system=tuple(_respace(kind, text) for text in prompt.system))
        messages = tuple(
            replace(message, parts=tuple(respace(part, message.role) for part in message.parts))
            for message in prompt.messages
        )
        return replace(prompt, messages=messages)

    return Plant("whitespace", place, _sometimes(rng, change))


def settings_changed(rng: Rng, app: App, place: str, choices: list[dict[str, Any]]) -> Plant:
    changed = rng.choice(choices)
    return Plant(
        "settings_changed", place,
        _sometimes(rng, lambda prompt, moment: replace(prompt, settings={**prompt.settings, **changed})),
    )  # fmt: skip


def model_changed(rng: Rng, app: App, place: str, other: str) -> Plant:
    return Plant(
        "model_changed", place, _sometimes(rng, lambda prompt, moment: replace(prompt, model=other))
    )


def media_changed(rng: Rng, app: App, place: str) -> Plant:
    def edit(moment: Moment) -> Change | None:
        if moment.turn == 0 or moment.rng.random() < 0.5:
            return None
        noise = base64.b64encode(b"\xff\xd8\xff" + moment.rng.randbytes(90)).decode()

        def recode(part: Part) -> Part:
            return replace(part, text=noise) if part.kind == "image" else part

        return Change(lambda prompt: _map_parts(prompt, recode, 1))

    def latest(moment: Moment) -> Change | None:
        def drop(prompt: Prompt) -> Prompt:
            hidden = Part("text", "[image removed]")
            return _map_parts(
                prompt,
                lambda part: hidden if part.kind == "image" else part,
                len(prompt.messages) - 1,
            )

        return Change(drop)

    return Plant("media_changed", place, rng.choice([edit, latest]))


def history_edited(rng: Rng, app: App, place: str) -> Plant:
    stub = rng.choice(["[Old tool result content cleared]", "(omitted)", "…"])
    keep = rng.choice([1, 2])

    def clear(prompt: Prompt) -> Prompt:
        results = [at for at, message in enumerate(prompt.messages) if message.role == "tool"]
        old = set(results[:-keep])
        messages = tuple(
            replace(message, parts=tuple(replace(part, text=stub) for part in message.parts))
            if at in old
            else message
            for at, message in enumerate(prompt.messages)
        )
        return replace(prompt, messages=messages)

    def slide(prompt: Prompt) -> Prompt:
        messages = prompt.messages
        return (
            replace(prompt, messages=(*messages[:2], *messages[-5:]))
            if len(messages) > 7
            else prompt
        )

    return Plant(
        "history_edited",
        place,
        lambda moment: Change(clear if app.kind in {"agent", "thinker"} else slide),
    )


def compaction(rng: Rng, app: App, place: str) -> Plant:
    summaries: dict[int, Message] = {}
    start = rng.choice([3, 4])

    def edit(moment: Moment) -> Change | None:
        if moment.turn < start:
            return None
        text = (
            "This session is being continued from a previous conversation that ran out of context. "
            f"The conversation is summarized below:\n{words.prose(moment.rng, 500)}"
        )
        summary = summaries.setdefault(moment.conversation, user(text))

        def compact(prompt: Prompt) -> Prompt:
            cut = moment.lengths[start]
            cut -= prompt.messages[cut - 1].role == "user"
            return replace(prompt, messages=(summary, *prompt.messages[cut:]))

        return Change(compact)

    return Plant("compaction", place, edit)


def reasoning_dropped(rng: Rng, app: App, place: str) -> Plant:
    def drop(prompt: Prompt) -> Prompt:
        newest = max(at for at, message in enumerate(prompt.messages) if message.role == "user")
        messages = tuple(
            replace(message, parts=tuple(part for part in message.parts if part.kind != "thinking"))
            if at < newest else message
            for at, message in enumerate(prompt.messages)
        )  # fmt: skip
        return replace(prompt, messages=messages)

    return Plant("reasoning_dropped", place, lambda moment: Change(drop))


def context_moved(rng: Rng, app: App, place: str) -> Plant:
    block = f"<memory>\n{words.prose(rng, 600)}\n</memory>"
    at_end = rng.random() < 0.5

    def add(message: Message) -> Message:
        first = message.parts[0]
        text = f"{first.text}\n\n{block}" if at_end else f"{block}\n\n{first.text}"
        return replace(message, parts=(replace(first, text=text), *message.parts[1:]))

    def hop(prompt: Prompt) -> Prompt:
        newest = max(at for at, message in enumerate(prompt.messages) if message.role == "user")
        messages = tuple(add(m) if at == newest else m for at, m in enumerate(prompt.messages))
        return replace(prompt, messages=messages)

    def stay(prompt: Prompt) -> Prompt:
        first = min(at for at, message in enumerate(prompt.messages) if message.role == "user")
        messages = tuple(add(m) if at == first else m for at, m in enumerate(prompt.messages))
        return replace(prompt, messages=messages)

    return Plant("context_moved", place, lambda moment: Change(hop, stay))


def system_hoisted(rng: Rng, app: App, place: str) -> Plant:
    turn, apart = rng.choice([1, 2]), rng.random() < 0.4
    notes: dict[int, str] = {}

    def edit(moment: Moment) -> Change | None:
        if moment.turn < turn:
            return None
        if moment.conversation not in notes:
            notes[moment.conversation] = (
                f"Note for this conversation: {words.prose(moment.rng, 200)}"
            )
        text = notes[moment.conversation]
        message = Message("system", (Part("text", text),))
        number = moment.lengths[turn] - 1

        def keep(prompt: Prompt) -> Prompt:
            return replace(
                prompt, messages=(*prompt.messages[:number], message, *prompt.messages[number:])
            )

        def hoist(prompt: Prompt) -> Prompt:
            last = prompt.system[-1]
            system = (*prompt.system, text) if apart else (*prompt.system[:-1], f"{last}\n\n{text}")
            return replace(prompt, system=system)

        return Change(keep if moment.turn == turn else hoist, keep)

    return Plant("system_hoisted", place, edit)


def cache_key_scattered(rng: Rng, app: App, place: str) -> Plant:
    app.prompt = replace(app.prompt, cache_key=f"app-{rng.randrange(10**6)}")

    def edit(moment: Moment) -> Change:
        key = words.uuid4(moment.rng)
        return Change(lambda prompt: replace(prompt, cache_key=key))

    return Plant("cache_key_scattered", place, edit)


def namespace_split(rng: Rng, app: App, place: str) -> Plant:
    app.prompt = replace(app.prompt, salt="shared")
    salts: dict[int, str] = {}

    def edit(moment: Moment) -> Change:
        salt = salts.setdefault(moment.conversation, f"user-{moment.rng.getrandbits(40):010x}")
        return Change(lambda prompt: replace(prompt, salt=salt))

    return Plant("namespace_split", place, edit)
