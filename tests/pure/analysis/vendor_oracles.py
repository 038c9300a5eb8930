"""Cache rules of vendors a second time, as simple as can be: entries are lists, every look-up scans all.

Imports nothing of the analyser. Token counts are given: a function from a segment's path to its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.pure.analysis.planted_bodies import Body, Piece, compact, pieces_of

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request: its body, the tokens of each segment, when it starts, answers and ends."""

    body: Body
    tokens: Mapping[str, Ids]  # by path of the segment
    start_s: float
    ready_s: float
    done_s: float
    answer: Ids = ()

    @property
    def content(self) -> list[Piece]:
        """Tools, system and messages."""
        return [piece for piece in pieces_of(self.body) if piece.kind != "setting"]

    @property
    def ids(self) -> Ids:
        """All tokens of the prompt."""
        return tuple(token for piece in self.content for token in self.tokens[piece.path])


@dataclass(frozen=True, slots=True)
class Bill:
    """Tokens read and written."""

    num_read: int
    num_written: int = 0
    num_written_1h: int = 0


class Oracle(Protocol):
    """A vendor's cache."""

    def ask(self, call: Call) -> Bill:
        """What a request reads and writes; requests come in order of start."""
        ...


@dataclass(slots=True)
class Entry:
    """A cached prefix: what it is of, and when it can be read."""

    prefix: Any
    length: int
    ready_s: float
    expiry_s: float
    lifetime_s: float

    def is_alive(self, at: float) -> bool:
        """Whether it can be read."""
        return self.ready_s <= at < self.expiry_s


ALL: tuple[str, ...] = ("model", "betas")
FROM_SYSTEM: tuple[str, ...] = ("speed",)
FROM_MESSAGES: tuple[str, ...] = ("tool_choice", "thinking", "output_config", "output_format")


@dataclass(slots=True)
class AnthropicOracle:
    """Entries where a breakpoint was; each breakpoint looks back over twenty positions."""

    min_tokens: int
    lookback: int = 20
    entries: list[Entry] = field(default_factory=list)

    def ask(self, call: Call) -> Bill:
        """See `Oracle`."""
        content = call.content
        marks = anthropic_marks(call.body)
        lengths = [0]
        for piece in content:
            lengths.append(lengths[-1] + len(call.tokens[piece.path]))
        position = list(_positions(call.body, content))
        hits: list[tuple[int, bool, Entry]] = []
        for at in (at for at, piece in enumerate(content) if piece.path in marks):
            for back in range(at + 1):
                if (
                    position[at] - position[back] < self.lookback
                    and lengths[back + 1] >= self.min_tokens
                ):
                    key, is_mark = (
                        self._prefix(call.body, content, back),
                        content[back].path in marks,
                    )
                    alive = [
                        e for e in self.entries if e.prefix == key and e.is_alive(call.start_s)
                    ]
                    hits.extend((lengths[back + 1], is_mark, entry) for entry in alive)
        read = max((length for length, _, _ in hits), default=0)
        for length, is_mark, entry in hits:
            if is_mark or length == read:
                entry.expiry_s = max(entry.expiry_s, call.start_s + entry.lifetime_s)
        written = last_1h = read
        for at, piece in enumerate(content):
            length = lengths[at + 1]
            if piece.path in marks and length > read and length >= self.min_tokens:
                lifetime = marks[piece.path]
                key = self._prefix(call.body, content, at)
                self.entries.append(
                    Entry(key, length, call.ready_s, call.ready_s + lifetime, lifetime)
                )
                written = length
                last_1h = length if lifetime == 3600.0 else last_1h
        return Bill(read, written - read, last_1h - read)

    @staticmethod
    def _prefix(body: Body, content: list[Piece], last: int) -> Any:
        names = ALL
        images = False
        if content[last].kind != "tool":
            names += FROM_SYSTEM
        if content[last].kind == "message":
            names += FROM_MESSAGES
            images = '"type":"image"' in compact(body["messages"])
        settings = tuple(compact(body.get(name)) for name in names)
        return (
            settings,
            images,
            tuple((piece.kind, piece.role, piece.content) for piece in content[: last + 1]),
        )


def anthropic_marks(body: Body) -> dict[str, float]:
    """Lifetime of each breakpoint by path."""
    marks: dict[str, float] = {}

    def look(block: Any, path: str) -> None:
        if isinstance(block, dict) and "cache_control" in block:
            marks[path] = 3600.0 if block["cache_control"].get("ttl") == "1h" else 300.0

    for at, tool in enumerate(body.get("tools", ())):
        look(tool, f"tools[{at}]")
    if isinstance(body.get("system"), list):
        for at, block in enumerate(body["system"]):
            look(block, f"system[{at}]")
    for at, message in enumerate(body["messages"]):
        if isinstance(message["content"], list):
            for number, block in enumerate(message["content"]):
                look(block, f"messages[{at}].content[{number}]")
    return marks


def _positions(body: Body, content: list[Piece]) -> Iterator[int]:
    """A run of calls is one position, and so is a run of results."""
    kinds: dict[str, str] = {}
    for at, message in enumerate(body["messages"]):
        if isinstance(message["content"], list):
            for number, block in enumerate(message["content"]):
                kinds[f"messages[{at}].content[{number}]"] = block["type"]
    number, before = -1, ""
    for piece in content:
        kind = kinds.get(piece.path, "")
        if kind not in {"tool_use", "tool_result"} or kind != before:
            number += 1
        before = kind
        yield number


@dataclass(slots=True)
class GridOracle:
    """All whole steps of earlier prompts, each with the time of its last use."""

    step: int
    least: int = 0
    lifetime_s: float = float("inf")
    keeps_one: bool = False  # the last token is always computed
    stores_answers: bool = False
    settings: tuple[str, ...] = ()
    pages: dict[int, Entry] = field(default_factory=dict)
    numbers: dict[Any, int] = field(
        default_factory=dict
    )  # of prefixes, by shorter one and last step

    def ask(self, call: Call) -> Bill:
        """See `Oracle`."""
        ids, salt = call.ids, tuple(compact(call.body.get(name)) for name in self.settings)
        read = 0
        for end, number in self._prefixes(salt, ids):
            entry = self.pages.get(number)
            if entry is None or not entry.is_alive(call.start_s):
                break
            read = end
        read = min(read, (len(ids) - self.keeps_one) // self.step * self.step)
        self._store(call, salt, ids, call.ready_s, 0)
        if self.stores_answers:
            self._store(call, salt, ids + call.answer, call.done_s, len(ids))
        return Bill(read if read >= self.least else 0)

    def _prefixes(self, salt: Any, ids: Ids) -> Iterator[tuple[int, int]]:
        """(end, number) of each prefix of whole steps; equal prefixes have equal numbers."""
        above: Any = salt
        for end in range(self.step, len(ids) + 1, self.step):
            key = above, ids[end - self.step : end]
            above = self.numbers.setdefault(key, len(self.numbers))
            yield end, above

    def _store(self, call: Call, salt: Any, ids: Ids, ready: float, after: int) -> None:
        for end, number in self._prefixes(salt, ids):
            if end <= after:
                continue
            entry = self.pages.get(number)
            if entry is None or entry.expiry_s <= call.start_s:
                self.pages[number] = Entry(
                    None, end, ready, ready + self.lifetime_s, self.lifetime_s
                )
            else:
                entry.ready_s = min(entry.ready_s, ready)
                entry.expiry_s = max(entry.expiry_s, call.start_s + self.lifetime_s)


@dataclass(slots=True)
class ImplicitOracle:
    """Newer OpenAI models: one entry at the latest user message or group of results."""

    settings: tuple[str, ...]
    min_tokens: int = 1024
    lifetime_s: float = 1800.0
    max_looked_up: int = 80
    entries: list[Entry] = field(default_factory=list)

    def ask(self, call: Call) -> Bill:
        """See `Oracle`."""
        content = call.content
        salt = tuple(compact(call.body.get(name)) for name in (*self.settings, "prompt_cache_key"))
        ends = list(self._breakpoints(call.body, content))
        keys = {
            at: (
                salt,
                tuple((piece.kind, piece.role, piece.content) for piece in content[: at + 1]),
            )
            for at in ends
        }
        length = {
            at: sum(len(call.tokens[piece.path]) for piece in content[: at + 1]) for at in ends
        }
        read, hits = 0, list[Entry]()
        for at in ends[-self.max_looked_up :]:
            if length[at] < self.min_tokens:
                continue
            alive = [e for e in self.entries if e.prefix == keys[at] and e.is_alive(call.start_s)]
            if alive:
                read, hits = length[at], alive
        if read:
            for entry in hits:
                entry.expiry_s = max(entry.expiry_s, call.start_s + entry.lifetime_s)
        last = ends[-1]
        if length[last] <= read or length[last] < self.min_tokens:
            return Bill(read)
        expiry = call.ready_s + self.lifetime_s
        self.entries.append(Entry(keys[last], length[last], call.ready_s, expiry, self.lifetime_s))
        return Bill(read, length[last] - read)

    @staticmethod
    def _breakpoints(body: Body, content: list[Piece]) -> Iterator[int]:
        def kind(piece: Piece | None) -> str:
            if piece is None or piece.kind != "message":
                return "" if piece is None else "lead"
            word = piece.role.split()[0] if piece.role else ""
            if word in {"system", "developer"}:
                return "lead"
            return "result" if word in {"tool", "function_call_output"} else word

        message = {piece.path: piece.path.split(".")[0] for piece in content}
        is_leading = True
        for at, piece in enumerate(content):
            after = content[at + 1] if at + 1 < len(content) else None
            is_leading = is_leading and kind(piece) == "lead"
            if (
                (is_leading and kind(after) != "lead")
                or (kind(piece) == "result" and kind(after) != "result")
                or (
                    kind(piece) == "user"
                    and (after is None or message[after.path] != message[piece.path])
                )
            ):
                yield at


@dataclass(slots=True)
class UnitOracle:
    """DeepSeek: units end where a prompt, an answer or a common prefix ends; all or nothing."""

    settings: tuple[str, ...]
    step: int = 64
    lifetime_s: float = 86400.0
    units: list[Entry] = field(default_factory=list)
    prompts: list[Entry] = field(default_factory=list)

    def ask(self, call: Call) -> Bill:
        """See `Oracle`."""
        salt = tuple(compact(call.body.get(name)) for name in self.settings)
        ids = (salt, *call.ids)
        alive = [
            e for e in self.units if e.is_alive(call.start_s) and ids[: len(e.prefix)] == e.prefix
        ]
        deepest = max((len(e.prefix) for e in alive), default=1)
        for entry in alive:
            if len(entry.prefix) == deepest:
                entry.expiry_s = max(entry.expiry_s, call.start_s + self.lifetime_s)
        common = 1
        for earlier in self.prompts:
            if earlier.is_alive(call.start_s):
                shared = next(
                    (
                        at
                        for at, pair in enumerate(zip(ids, earlier.prefix, strict=False))
                        if pair[0] != pair[1]
                    ),
                    min(len(ids), len(earlier.prefix)),
                )
                common = max(common, 1 + (shared - 1) // self.step * self.step)
        self._store(call, ids, call.ready_s)
        if common > deepest:
            self._store(call, ids[:common], call.ready_s)
        self.prompts.append(
            Entry(ids, len(ids), call.ready_s, call.ready_s + self.lifetime_s, self.lifetime_s)
        )
        if call.answer:
            self._store(call, ids + call.answer, call.done_s)
        return Bill((deepest - 1) // self.step * self.step)

    def _store(self, call: Call, ids: tuple[Any, ...], ready: float) -> None:
        self.units.append(Entry(ids, len(ids), ready, ready + self.lifetime_s, self.lifetime_s))


ENGINE_SETTINGS = ("model", "chat_template_kwargs", "enable_thinking", "reasoning_effort")
OPENAI_SETTINGS = (
    "model", "response_format", "text", "reasoning", "reasoning_effort", "verbosity", "parallel_tool_calls",
    "service_tier",
)  # fmt: skip

ORACLES: dict[tuple[str, str], Callable[[], Oracle]] = {
    ("anthropic", "claude-sonnet-4-5"): lambda: AnthropicOracle(1024),
    ("anthropic", "claude-opus-5"): lambda: AnthropicOracle(512),
    ("anthropic", "claude-opus-4-7"): lambda: AnthropicOracle(2048),
    ("anthropic", "claude-haiku-4-5"): lambda: AnthropicOracle(4096),
    ("openai", "gpt-4.1"): lambda: GridOracle(
        128, 1024, 600.0, settings=(*OPENAI_SETTINGS, "prompt_cache_key")
    ),
    ("openai", "gpt-4o"): lambda: GridOracle(
        128, 1024, 600.0, settings=(*OPENAI_SETTINGS, "prompt_cache_key")
    ),
    ("openai", "gpt-5.6"): lambda: ImplicitOracle(OPENAI_SETTINGS),
    ("openai", "gpt-6-sol"): lambda: ImplicitOracle(OPENAI_SETTINGS),
    ("deepseek", "deepseek-v4-pro"): lambda: UnitOracle(
        ("model", "response_format", "thinking", "reasoning_effort")
    ),
    ("vllm", "Qwen/Qwen3-32B"): lambda: GridOracle(
        16, keeps_one=True, stores_answers=True, settings=ENGINE_SETTINGS
    ),
    ("sglang", "Qwen/Qwen3-32B"): lambda: GridOracle(
        1, keeps_one=True, stores_answers=True, settings=ENGINE_SETTINGS
    ),
    ("ramify", "Qwen/Qwen3-32B"): lambda: GridOracle(
        16, keeps_one=True, stores_answers=True, settings=ENGINE_SETTINGS
    ),
}
