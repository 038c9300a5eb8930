"""Values that change inside a text: slots of an app, filled anew at a known rate. Stdlib only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.pure.analysis import planted_words as words
from tests.pure.analysis.planted_prompts import (
    CLOSE,
    OPEN,
    App,
    Edit,
    Part,
    Prompt,
)  # fmt: skip
from tests.pure.analysis.planted_words import Rng


@dataclass(frozen=True, slots=True)
class Moment:
    """When and where in its cell a request is sent."""

    rng: Rng
    at: float  # seconds since the epoch
    conversation: int
    turn: int
    number: int  # of the request in its cell
    lengths: tuple[int, ...] = ()  # messages of the clean prompt at each turn so far


def same(prompt: Prompt) -> Prompt:
    """The prompt as it is."""
    return prompt


@dataclass(frozen=True, slots=True)
class Change:
    """What a cause makes of a clean prompt, and what the mended prompt has in its place."""

    sent: Edit
    mended: Edit = same


@dataclass(slots=True)
class Plant:
    """A cause at a place of an app: `edit` gives what it does to the prompt sent at a moment."""

    cause: str
    place: str
    edit: Callable[[Moment], Change | None]
    clean: str = ""  # what stands in the slot if mended


def slot(place: str) -> str:
    """A mark in a text that a value replaces."""
    return f"{OPEN}{place}{CLOSE}"


def map_texts(prompt: Prompt, change: Callable[[str], str]) -> Prompt:
    """Change every text that a slot can be in."""

    def of_part(part: Part) -> Part:
        return replace(part, text=change(part.text)) if OPEN in part.text else part

    messages = tuple(
        replace(message, parts=tuple(map(of_part, message.parts)))
        if any(OPEN in part.text for part in message.parts)
        else message
        for message in prompt.messages
    )
    tools = tuple(
        replace(tool, description=change(tool.description)) if OPEN in tool.description else tool
        for tool in prompt.tools
    )
    return replace(prompt, system=tuple(map(change, prompt.system)), messages=messages, tools=tools)


def _fill(place: str, value: str) -> Edit:
    mark = slot(place)
    return lambda prompt: map_texts(prompt, lambda text: text.replace(mark, value))


def fill_slots(prompt: Prompt, clean: dict[str, str]) -> Prompt:
    """The prompt with mended values in the slots that no edit has filled."""
    for place, value in clean.items():
        prompt = _fill(place, value)(prompt)
    return prompt


def _insert(rng: Rng, app: App, place: str, where: str) -> None:
    """Put a slot into the app."""
    prompt, mark = app.prompt, slot(place)
    if where == "tool" and prompt.tools:
        at = rng.randrange(len(prompt.tools))
        tool = prompt.tools[at]
        tools = list(prompt.tools)
        tools[at] = replace(tool, description=f"{tool.description} {mark} {words.sentence(rng)}")
        app.prompt = replace(prompt, tools=tuple(tools))
        return
    if where == "preamble" and app.kind != "few_shot":
        app.preamble = f"{app.preamble}<env>\n{mark}\n</env>\n{words.prose(rng, 300)}\n\n"
        return
    if where == "block":
        app.prompt = replace(prompt, system=(mark, *prompt.system))
        return
    paragraphs = prompt.system[-1].split("\n\n")
    at = {"start": 0, "end": len(paragraphs)}.get(where, len(paragraphs) // 2)
    paragraphs.insert(at, mark)
    app.prompt = replace(prompt, system=(*prompt.system[:-1], "\n\n".join(paragraphs)))


def _slot_plant(
    rng: Rng,
    app: App,
    cause: str,
    place: str,
    make: Callable[[Moment], str],
    wheres: list[str],
    rates: list[float],
) -> Plant:
    where, rate = rng.choice(wheres), rng.choice(rates)
    by_conversation = rng.random() < 0.25 and not app.is_single_turn
    _insert(rng, app, place, where)
    kept: dict[int, str] = {}

    def edit(moment: Moment) -> Change:
        key = moment.conversation if by_conversation else 0
        if key not in kept or (not by_conversation and moment.rng.random() < rate):
            kept[key] = make(moment)
        return Change(_fill(place, kept[key]))

    plant = Plant(cause, place, edit)
    plant.clean = make(Moment(rng, 1_795_000_000.0, 0, 0, 0))
    return plant


PLACES = ["start", "middle", "middle", "end", "tool", "preamble"]
RATES = [0.3, 0.6, 1.0, 1.0]


def clock(rng: Rng, app: App, place: str) -> Plant:
    pool = words.CLOCKS if rng.random() < 0.5 else words.RARE_CLOCKS
    render = rng.choice(list(pool.values()))
    return _slot_plant(rng, app, "clock", place, lambda moment: render(moment.at), PLACES, RATES)


def random_id(rng: Rng, app: App, place: str) -> Plant:
    pool = words.IDS if rng.random() < 0.5 else words.RARE_IDS
    make, cue = rng.choice(list(pool.values())), rng.choice(words.ID_CUES)
    return _slot_plant(
        rng, app, "random_id", place, lambda moment: cue.format(make(moment.rng)), PLACES, RATES
    )


def path_or_state(rng: Rng, app: App, place: str) -> Plant:
    kind = rng.choice(words.STATES)
    return _slot_plant(
        rng, app, "path_or_state", place,
        lambda moment: words.path_or_state(moment.rng, kind, moment.number + 1),
        ["start", "middle", "end", "end", "preamble"], RATES,
    )  # fmt: skip


def billing_header(rng: Rng, app: App, place: str) -> Plant:
    version = f"2.1.{rng.randrange(99)}"

    def make(moment: Moment) -> str:
        return (
            f"x-anthropic-billing-header: cc_version={version}.{moment.rng.getrandbits(12):03x}; "
            f"cc_entrypoint=cli; cch={moment.rng.getrandbits(20):05x};"
        )

    return _slot_plant(rng, app, "billing_header", place, make, ["block"], [1.0])
