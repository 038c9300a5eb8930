"""Records exchanges with a server over a fake device as lines of JSON that are equal on every run.

A dialogue is a line with its name, then for each exchange a line with the request, a line with status
and headers, and the body: a JSON object on a line of its own, or a line for each server-sent event.
A body that these lines do not give back byte for byte is a line with its text. Beside the status
stand the prompts that ran, each without the characters that it shares with the one before it.

Ids and times are replaced: random digits by `<1>`, `<2>`, … in order of appearance in the dialogue,
times by 0, the version by VERSION. Some templates write ids of calls into the prompt, and random
hexadecimal digits are tokens of different lengths: here ids are decimal digits, each a token.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

from ramify import __version__
from ramify.engine.step import StepPlan, StepResult
from ramify.testing import FakeExecutor, fake_next_token
from tests.pure.server_bench import Answer, ServerBench
from tests.pure.whole_steps import WholeSteps

MAX_TEXT_CHARS = (
    1600  # of a recorded request or prompt; a longer text is its beginning and a digest
)
MIN_SHARED_CHARS = 60  # of a prompt with the one before it in the dialogue, to leave them out
UNRECORDED_HEADERS = frozenset({"content-length", "date", "server"})
FINGERPRINT = f"ramify-{__version__}"
RANDOM_DIGITS = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{24})(?![0-9a-f])")
DIGITS = re.compile(r"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{24}|[0-9a-f]{9})(?![0-9a-f])")
SHORT_CALL_ID = re.compile(r'(?<=")[0-9a-f]{9}(?=")')
TIME = re.compile(
    r'("(?:created|created_at|completed_at|expires_at|modified_at|evicted_ago_s|\w+_duration)":)'
    r'(?:[\d.e-]+|"\d{4}-[^"]*")'
)


@dataclass(frozen=True)
class Earlier:
    """A value of an earlier answer of the dialogue, in a request.

    Args:
        number: of the answer.
        keys: lead to the value, from the JSON of the body or the list of its events.
        is_spread: the value is a list, whose items stand in place of this.
    """

    number: int
    keys: tuple[str | int, ...]
    is_spread: bool = False

    def value(self, answers: Sequence[Answer]) -> Any:
        """The value."""
        answer = answers[self.number]
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        value: Any = answer.events if is_stream else answer.json
        for key in self.keys:
            value = value[key]
        return value


def earlier(number: int, *keys: str | int) -> Earlier:
    """A value of an earlier answer."""
    return Earlier(number, keys)


def spread(number: int, *keys: str | int) -> Earlier:
    """The items of a list in an earlier answer."""
    return Earlier(number, keys, is_spread=True)


@dataclass(frozen=True)
class Exchange:
    """A request to a server, and what its model writes.

    Args:
        target: path and query; pieces that are joined if it is a tuple.
        body: JSON; bytes are sent as they are.
        text: of the model; None: see `writer`.
    """

    target: str | tuple[str | Earlier, ...]
    body: Any = b""
    text: str | None = None
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialogue:
    """Exchanges one after the other, against an empty cache."""

    name: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class DialogueGroup:
    """Dialogues with one server.

    Args:
        name: of the recording.
        options: of the `ServerBench`.
    """

    name: str
    dialogues: Sequence[Dialogue]
    options: Mapping[str, Any] = field(default_factory=dict)


def filled(value: Any, answers: Sequence[Answer]) -> Any:
    """A request's value with those of earlier answers in place of `Earlier`."""
    if isinstance(value, Earlier):
        return value.value(answers)
    if isinstance(value, dict):
        return {key: filled(item, answers) for key, item in value.items()}
    if isinstance(value, list):
        items: list[Any] = []
        for item in value:
            is_spread = isinstance(item, Earlier) and item.is_spread
            items += filled(item, answers) if is_spread else [filled(item, answers)]
        return items
    return value


class PacedExecutor(WholeSteps):
    """Runs a step when the event loop has taken all tokens of the step before it.

    A reader that comes late gets the tokens of several steps as a single increment.
    """

    def __init__(self, device: FakeExecutor, loop: asyncio.AbstractEventLoop) -> None:
        self.device, self._loop = device, loop

    def execute(self, plan: StepPlan) -> StepResult:
        """See `WholeSteps.execute`."""
        asyncio.run_coroutine_threadsafe(self._until_idle(), self._loop).result()
        return self.device.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.device.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self.device.copy_pages(pairs)

    async def _until_idle(self) -> None:
        """Until nothing but this is ready to run in the event loop."""
        await asyncio.sleep(0)
        while self._loop._ready:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0)


class Script:
    """Tokens of a text, from the first context on, then the end."""

    def __init__(self, bench: ServerBench, text: str) -> None:
        tokenizer = bench.service.tokenizer
        self._ids = [*tokenizer.encode(text, False), tokenizer.eos_token_ids[0]]
        self._start: int | None = None

    def __call__(self, context: Sequence[int]) -> int:
        self._start = len(context) if self._start is None else self._start
        return int(self._ids[min(len(context) - self._start, len(self._ids) - 1)])


def writer(bench: ServerBench, exchange: Exchange) -> Callable[[Sequence[int]], int] | None:
    """What the model of a bench writes: the text, or what depends on the context and on a given seed.

    Without a seed, the server draws one.
    """
    if exchange.text is not None:
        return Script(bench, exchange.text)
    if isinstance(exchange.body, dict) and exchange.body.get("seed") is not None:
        return None
    return partial(fake_next_token, vocab_size=bench.device.vocab_size)


class NumberedIds:
    """In place of `secrets.token_hex`: the decimal digits of a counter, the last digit first."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def __call__(self, num_bytes: int = 32) -> str:
        return f"{next(self._numbers):0{2 * num_bytes}}"[::-1]


class Placeholders:
    """Replaces ids and times, the same id by the same placeholder."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def replace(self, text: str) -> str:
        """The text with placeholders."""
        for digits in (*RANDOM_DIGITS.findall(text), *SHORT_CALL_ID.findall(text)):
            self._names.setdefault(digits, f"<{len(self._names) + 1}>")
        text = DIGITS.sub(lambda match: self._names.get(match[0], match[0]), text)
        return TIME.sub(r"\g<1>0", text.replace(FINGERPRINT, "ramify-VERSION"))


def as_json(value: object) -> str:
    """A line of a recording."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def abridged(value: Any) -> Any:
    """A value as it is recorded: a long text as its beginning and a digest."""
    text = value if isinstance(value, str) else as_json(value)
    if len(text) <= MAX_TEXT_CHARS:
        return value
    return {
        "begin": text[:100],
        "num_chars": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:20],
    }


def num_common(text: str, other: str) -> int:
    """The number of characters at the beginning of both texts."""
    pairs = enumerate(zip(text, other, strict=False))
    shorter = min(len(text), len(other))
    return next((number for number, (a, b) in pairs if a != b), shorter)


def body_lines(text: str) -> list[str]:
    """The lines of a body, from which its text can be made again."""
    if is_json(text) and "\n" not in text:
        return [text]
    values = text.removesuffix("\n").split("\n")
    if text.endswith("\n") and all(map(is_json, values)):
        return values
    lines, again = [], ""
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = event.rpartition("data: ")
        again += f"{name}data: {data}\n\n"
        name = name.removeprefix("event: ").removesuffix("\n")
        value = data if is_json(data) else as_json(data)
        lines.append(f'{{"event":{as_json(name)},"data":{value}}}')
    return lines if again == text else [as_json({"text": text})]


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


class Recorder:
    """Plays the dialogues of a group and records them."""

    def __init__(self, group: DialogueGroup) -> None:
        self.group = group
        self.bench = ServerBench(**group.options)
        self._last_prompt = ""  # of the dialogue

    async def recordings(self) -> dict[str, list[str]]:
        """The lines of each dialogue, by name."""
        device = self.bench.device
        self.bench.core.executor = PacedExecutor(device, asyncio.get_running_loop())
        lines = {}
        with mock.patch("secrets.token_hex", NumberedIds()):
            async with self.bench.running():
                for dialogue in self.group.dialogues:
                    assert dialogue.name not in lines, dialogue.name
                    lines[dialogue.name] = await self._play(dialogue)
                    await self._forget()
        return lines

    async def _play(self, dialogue: Dialogue) -> list[str]:
        placeholders = Placeholders()
        self._last_prompt = ""
        lines = [as_json({"dialogue": dialogue.name})]
        answers: list[Answer] = []
        for exchange in dialogue.exchanges:
            lines += map(placeholders.replace, await self._exchange(exchange, answers))
        return lines

    async def _exchange(self, exchange: Exchange, answers: list[Answer]) -> list[str]:
        """Send a request; appends its answer."""
        pieces = (exchange.target,) if isinstance(exchange.target, str) else exchange.target
        target = "".join(str(filled(piece, answers)) for piece in pieces)
        body = filled(exchange.body, answers)
        self.bench.ended.clear()
        self.bench.device.next_token = writer(self.bench, exchange)
        answer = await self.bench.call(exchange.method, target, body, headers=exchange.headers)
        await self.bench.until_idle()
        answers.append(answer)
        request: dict[str, Any] = {exchange.method: target}
        if exchange.headers:
            request["headers"] = dict(exchange.headers)
        if body != b"":
            request["body"] = abridged(repr(body) if isinstance(body, bytes) else body)
        headers = {k: v for k, v in answer.headers.items() if k not in UNRECORDED_HEADERS}
        response: dict[str, Any] = {"status": answer.status, "headers": headers}
        if self.bench.ended:
            prompts = [ended.request.prompt for ended in self.bench.ended]
            response["prompts"] = [
                self._prompt(prompt.text or prompt.ids.tolist()) for prompt in prompts
            ]
        return [as_json(request), as_json(response), *body_lines(answer.body.decode())]

    def _prompt(self, text: str | list[int]) -> Any:
        """A prompt as it is recorded: what it shares with the one before it is a number.

        Args:
            text: or the token ids of a completion's prompt, which has no text.
        """
        if not isinstance(text, str):
            return abridged(text)
        num_shared = num_common(self._last_prompt, text)
        self._last_prompt = text
        if num_shared < MIN_SHARED_CHARS:
            return abridged(text)
        return {"num_shared_chars": num_shared, "text": abridged(text[num_shared:])}

    async def _forget(self) -> None:
        """Empty the cache."""

        def unpin(core: Any) -> None:
            for pin in core.cache.pins():
                core.cache.unpin(pin)

        await self.bench.llm.run(unpin)
        await self.bench.llm.cache.clear()


def split_recording(text: str) -> Iterator[tuple[str, list[str]]]:
    """The dialogues of a recorded file: names and lines."""
    name, lines = "", list[str]()
    for line in text.split("\n")[:-1]:
        if line.startswith('{"dialogue":'):
            if lines:
                yield name, lines
            name, lines = json.loads(line)["dialogue"], []
        lines.append(line)
    if lines:
        yield name, lines
