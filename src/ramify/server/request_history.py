"""What earlier requests asked, so that a later one can be told what it changed."""

from __future__ import annotations

import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ramify.server.prompt_renderer import RenderedPrompt, common_prefix

MAX_ENTRIES = 4096
MAX_TOKENS = 8_000_000  # of all prompts that are remembered: 32 MB
TTL_S = 24 * 3600.0


def canonical_json(value: object) -> str:
    """A value as text in which order matters only where it does in JSON: in lists."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One request as its prompt was made of it; the first five fields are compared."""

    model: str
    options: Mapping[str, str]  # what else changes the prompt, by the API's name for it
    tools: tuple[str, ...]  # canonical
    system: str  # canonical; "" where the API has none
    messages: tuple[str, ...]  # canonical
    prompt: RenderedPrompt
    response: object = None  # of the Responses API: what its next turn is made from
    paths: tuple[str, ...] = ()  # of the messages, where they are not `messages[i]`
    max_shared: int | None = (
        None  # tokens that were kept for others; None: what the next turn has too
    )

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that a later request could have read."""
        return self.prompt.num_stable_tokens if self.max_shared is None else self.max_shared

    def path_of(self, message: int) -> str:
        """The name of a message in the API that it came by."""
        return self.paths[message] if message < len(self.paths) else f"messages[{message}]"


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """The first thing in which a request differs from an earlier one, in the order of a prompt."""

    kind: str  # "model", "tools", "system", "messages", or a name of `HistoryEntry.options`
    path: str  # of the first part that differs
    at_token: int  # prompts are the same up to here
    missed_tokens: int  # of the earlier prompt, beyond it


def first_difference(old: HistoryEntry, new: HistoryEntry) -> PromptDifference | None:
    """What keeps the new request from beginning as the old one; None if nothing does.

    Messages that were only added are no change.
    """
    same = common_tokens(old.prompt.ids, new.prompt.ids)

    def change(kind: str, path: str) -> PromptDifference:
        return PromptDifference(kind, path, same, max(0, old.num_reusable_tokens - same))

    if old.model != new.model:
        return PromptDifference("model", "model", 0, old.num_reusable_tokens)
    if old.tools != new.tools:
        return change("tools", f"tools[{_first_differing(old.tools, new.tools)}]")
    if old.system != new.system:
        path = new.prompt.path_at(same)
        return change("system", path if path.startswith("system") else "system")
    place = _first_differing(old.messages, new.messages)
    if place < len(old.messages):
        whole = (new if place < len(new.messages) else old).path_of(place)
        path = new.prompt.path_at(same) if place < len(new.messages) else whole
        return change("messages", path if path.startswith(whole) else whole)
    for name in sorted(old.options.keys() | new.options.keys()):
        if old.options.get(name) != new.options.get(name):
            return change(name, name)
    return None


def is_fully_reused(old: HistoryEntry, new: HistoryEntry, num_cached: int, page_size: int) -> bool:
    """Whether all whole pages that the old request left were there for the new one."""
    if common_tokens(old.prompt.ids, new.prompt.ids) < old.num_reusable_tokens:
        return False
    usable = min(old.num_reusable_tokens, len(new.prompt.ids) - 1) // page_size * page_size
    return 0 < usable <= num_cached


def common_tokens(one: array[int], other: array[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return common_prefix(one, other)


def _first_differing(old: Sequence[str], new: Sequence[str]) -> int:
    """The first place at which two lists differ, one being shorter included."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))


class RequestHistory:
    """Records by tenant and id of the response; bounded in number, tokens and age.

    Args:
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        max_entries: int = MAX_ENTRIES,
        max_tokens: int = MAX_TOKENS,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_entries, self.max_tokens, self.ttl_s = max_entries, max_tokens, ttl_s
        self._clock = clock
        self._entries: dict[str, OrderedDict[str, tuple[float, HistoryEntry]]] = {}  # by tenant
        self._num_tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def put(self, tenant: str, response_id: str, entry: HistoryEntry) -> None:
        """Remember a request under the id of its response.

        When there are too many, the oldest of the tenant goes that has most.
        """
        self.forget(tenant, response_id)
        own = self._entries.setdefault(tenant, OrderedDict())
        own[response_id] = (self._clock() + self.ttl_s, entry)
        self._num_tokens[tenant] = self._num_tokens.get(tenant, 0) + len(entry.prompt.ids)
        while sum(self._num_tokens.values()) > self.max_tokens:
            self._forget_oldest(max(self._num_tokens, key=lambda name: self._num_tokens[name]))
        while len(self) > self.max_entries:
            self._forget_oldest(max(self._entries, key=lambda name: len(self._entries[name])))

    def get(self, tenant: str, response_id: str) -> HistoryEntry | None:
        """The request of that response, if this tenant made it and it is still remembered."""
        self._expire()
        own = self._entries.get(tenant)
        entry = None if own is None else own.get(response_id)
        return None if entry is None else entry[1]

    def forget(self, tenant: str, response_id: str) -> bool:
        """Drop one; whether it was there."""
        own = self._entries.get(tenant)
        entry = None if own is None else own.pop(response_id, None)
        if own is None or entry is None:
            return False
        self._num_tokens[tenant] -= len(entry[1].prompt.ids)
        if not own:
            del self._entries[tenant], self._num_tokens[tenant]
        return True

    def _forget_oldest(self, tenant: str) -> None:
        self.forget(tenant, next(iter(self._entries[tenant])))

    def _expire(self) -> None:
        now = self._clock()
        for tenant in list(self._entries):
            while (own := self._entries.get(tenant)) and next(iter(own.values()))[0] <= now:
                self._forget_oldest(tenant)
