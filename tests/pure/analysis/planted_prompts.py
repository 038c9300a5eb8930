"""Prompts of planted logs before any API's shape: apps, their conversations, turn by turn. Stdlib only."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.pure.analysis import planted_words as words
from tests.pure.analysis.planted_words import Rng

OPEN, CLOSE = "\ue000", "\ue001"  # around the name of a slot in a text


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a message."""

    kind: str  # text, image, thinking, call, result
    text: str = ""  # of text, thinking, a result; base64 of an image
    call_id: str = ""
    name: str = ""  # of the function called
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A message; results are messages of their own, as in the chat API."""

    role: str  # user, assistant, tool, system
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """All that decides what a server reads and caches."""

    model: str
    system: tuple[str, ...]
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    cache_key: str | None = None
    salt: str | None = None
    marks: tuple[str, ...] = ()  # breakpoints: system, tools, last, or index of a message
    ttl: str | None = None


Edit = Callable[[Prompt], Prompt]


def user(text: str, *more: Part) -> Message:
    """A message of the user."""
    return Message("user", (Part("text", text), *more))


def assistant(text: str, *more: Part) -> Message:
    """An answer of the model."""
    return Message("assistant", (*((Part("text", text),) if text else ()), *more))


_VERBS = (
    "search fetch list create update delete measure compare render deploy inspect translate".split()
)
_NOUNS = "orders tickets files branches invoices sensors routes notes builds accounts maps recipes".split()


def make_tool(rng: Rng, taken: set[str]) -> Tool:
    """A tool with a schema of three to six arguments."""
    while True:
        name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
        if name not in taken:
            taken.add(name)
            break
    fields = rng.sample(
        "query limit path owner since format depth label region verbose".split(),
        rng.randrange(3, 7),
    )
    properties: dict[str, Any] = {}
    for item in fields:
        kind = rng.choice(["string", "integer", "boolean"])
        properties[item] = {"type": kind, "description": words.sentence(rng)}
        if kind == "string" and rng.random() < 0.3:
            properties[item]["enum"] = rng.sample("json text csv html short long".split(), 3)
    schema = {
        "type": "object",
        "properties": properties,
        "required": fields[:2],
        "additionalProperties": False,
    }
    return Tool(name, words.prose(rng, 160), schema)


@dataclass(slots=True)
class App:
    """A program that sends requests: what is equal in all its prompts."""

    kind: str  # agent, chat, rag, few_shot, vision, thinker
    prompt: Prompt
    shots: tuple[Message, ...] = ()
    documents: list[str] = field(default_factory=list)
    preamble: str = ""  # of the first user message of a conversation

    @property
    def is_single_turn(self) -> bool:
        """Whether a conversation is one request."""
        return self.kind == "few_shot"


def make_app(rng: Rng, kind: str, model: str, *, system_chars: int = 5600) -> App:
    """An app whose system prompt no other has."""
    taken: set[str] = set()
    num_tools = {"agent": rng.randrange(4, 9), "thinker": rng.randrange(3, 5)}.get(kind, 0)
    title = f"{rng.choice(['You are', 'Act as', 'Role:'])} {words.name(rng)}-{rng.randrange(10**6)}"
    role = {
        "agent": "a coding agent that works in a repository",
        "chat": "a patient assistant with a dry sense of humour",
        "rag": "a librarian who answers from documents only",
        "few_shot": "a classifier that answers with a label",
        "vision": "an inspector of photographs",
        "thinker": "a planner who thinks before acting",
    }[kind]
    text = f"{title}, {role}.\n\n{words.prose(rng, system_chars)}"
    app = App(
        kind,
        Prompt(
            model=model,
            system=(text,),
            tools=tuple(make_tool(rng, taken) for _ in range(num_tools)),
        ),
    )
    if kind == "few_shot":
        for _ in range(6):
            app.shots += (user(f"Classify: {words.prose(rng, 120)}"), assistant(words.topic(rng)))
    if kind == "rag":
        app.documents = [words.prose(rng, 1500) for _ in range(5)]
    return app


def _results(rng: Rng, call_id: str, clock: int) -> Part:
    """What a tool answered: prose, or JSON with ids, dates and paths that are news."""
    if rng.random() < 0.5:
        return Part("result", words.prose(rng, rng.randrange(80, 500)), call_id=call_id)
    value = {
        "id": words.uuid4(rng),
        "updated_at": f"2026-11-{1 + clock % 28:02d}T{rng.randrange(24):02d}:{rng.randrange(60):02d}:00Z",
        "path": f"/srv/data/{words.topic(rng)}/{rng.randrange(1000)}.csv",
        "score": rng.randrange(1000) / 8,
        "note": words.sentence(rng) + rng.choice(["", " Señor Müller – 20 °C", " naïve café"]),
    }
    return Part("result", json.dumps(value, ensure_ascii=False), call_id=call_id)


def call_id(rng: Rng) -> str:
    """An id as APIs give to tool calls."""
    return "call_" + "".join(
        rng.choice("ABCDEFGHIJKLMNOPabcdefghijklmnop0123456789") for _ in range(24)
    )


def _arguments(rng: Rng, tool: Tool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, rule in tool.schema["properties"].items():
        if rule["type"] == "string":
            values[key] = f"{words.topic(rng)} {rng.randrange(100)}"
        elif rule["type"] == "integer":
            values[key] = rng.randrange(50)
        else:
            values[key] = rng.random() < 0.5
    return values


def question(rng: Rng) -> str:
    """A user's message, with the dates, numbers, paths and ids that users write."""
    start = f"Please tell me about {words.topic(rng)} and {words.topic(rng)}, case {rng.randrange(10**6)}."
    decoys = [
        "",
        f" It is about order {words.uuid4(rng)}.",
        f" The call was on 2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d} at {rng.randrange(24)}:15.",
        f" See /home/{words.name(rng).lower()}/notes/{rng.randrange(100)}.md.",
        f" Reference {rng.getrandbits(48):012x}; I wrote yesterday and 3 hours ago.",
        f" My name is {words.name(rng)}.",
    ]
    return start + rng.choice(decoys) + " " + words.sentence(rng)


def image(rng: Rng) -> Part:
    """A small picture as base64."""
    return Part(
        "image",
        base64.b64encode(b"\x89PNG\r\n\x1a\n" + rng.randbytes(rng.randrange(60, 300))).decode(),
    )


def conversation(rng: Rng, app: App, num_turns: int, clock: int = 0) -> list[Prompt]:
    """Prompts of one conversation, each the start of the next."""
    messages: list[Message] = list(app.shots)
    prompts: list[Prompt] = []
    tools = app.prompt.tools

    def ask(message: Message) -> None:
        messages.append(message)
        prompts.append(replace(app.prompt, messages=tuple(messages)))

    first = question(rng)
    if app.kind == "rag":
        first = f"Document:\n{rng.choice(app.documents)}\n\nQuestion: {first}"
    if app.kind == "few_shot":
        first = f"Classify: {question(rng)}"
    ask(user(app.preamble + first, *([image(rng)] if app.kind == "vision" else [])))
    while len(prompts) < num_turns:
        think = (Part("thinking", words.prose(rng, 200)),) if app.kind == "thinker" else ()
        if tools and rng.random() < 0.75:
            ids = [call_id(rng) for _ in range(rng.choice([1, 1, 1, 2]))]
            calls = []
            for item in ids:
                tool = rng.choice(tools)
                calls.append(
                    Part("call", call_id=item, name=tool.name, arguments=_arguments(rng, tool))
                )
            text = words.sentence(rng) if rng.random() < 0.6 else ""
            spoken = (Part("text", text),) if text else ()
            messages.append(Message("assistant", (*think, *spoken, *calls)))
            for item in ids[:-1]:
                messages.append(Message("tool", (_results(rng, item, clock),)))
            ask(Message("tool", (_results(rng, ids[-1], clock),)))
        else:
            messages.append(Message("assistant", (*think, Part("text", words.prose(rng, 150)))))
            ask(user(question(rng), *([image(rng)] if app.kind == "vision" else [])))
    return prompts
