"""Recent prompts by response id, and the first difference between two of them."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ramify.server.prompt_renderer import RenderedPrompt, common_prefix

MAX_ENTRIES = 4096
MAX_TOKENS = 8_000_000  # of all remembered prompts: 32 MB
TTL_S = 24 * 3600.0


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal values: keys are sorted, lists keep their order."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A request as its prompt was made of it. `first_difference` compares the first five fields."""

    model: str
    options: Mapping[str, str]  # further request fields that may change the prompt, by name
    tools: tuple[str, ...] = ()  # as `canonical_json`
    system: str = ""  # as `canonical_json`; "" where the API has none
    messages: tuple[str, ...]  # as `canonical_json`
    prompt: RenderedPrompt
    response: object = None  # Responses API: the `StoredResponse` that a next turn continues
    paths: tuple[str, ...] = ()  # request fields of the messages, if not `messages[i]`
    max_shared: int | None = None  # tokens that may stay cached for others; None: all

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that a later request could have read from the cache."""
        return self.prompt.num_stable_tokens if self.max_shared is None else self.max_shared

    def path_of(self, message: int) -> str:
        """The request field that a message came from."""
        return self.paths[message] if message < len(self.paths) else f"messages[{message}]"


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """The first field in which a request differs from an earlier one, in the order of a prompt."""

    kind: str  # "model", "tools", "system", "messages", or a name of `HistoryEntry.options`
    path: str  # of the first message, tool or option that differs
    at_token: int  # length of the prompts' common prefix
    missed_tokens: int  # reusable tokens of the earlier prompt after it


def first_difference(old: HistoryEntry, new: HistoryEntry) -> PromptDifference | None:
    """Why the new prompt does not extend the old one; None if it does.

    Appended messages are not a difference.
    """
    num_common = common_prefix(old.prompt.ids, new.prompt.ids)

    def difference(kind: str, path: str) -> PromptDifference:
        num_missed = max(0, old.num_reusable_tokens - num_common)
        return PromptDifference(kind, path, num_common, num_missed)

    if old.model != new.model:
        return PromptDifference("model", "model", 0, old.num_reusable_tokens)
    if old.tools != new.tools:
        return difference("tools", f"tools[{_first_differing_index(old.tools, new.tools)}]")
    if old.system != new.system:
        path = new.prompt.path_at(num_common)
        return difference("system", path if path.startswith("system") else "system")
    index = _first_differing_index(old.messages, new.messages)
    if index < len(old.messages):
        message_path = (new if index < len(new.messages) else old).path_of(index)
        path = new.prompt.path_at(num_common) if index < len(new.messages) else message_path
        return difference("messages", path if path.startswith(message_path) else message_path)
    for name in sorted(old.options.keys() | new.options.keys()):
        if old.options.get(name) != new.options.get(name):
            return difference(name, name)
    return None


def is_fully_reused(old: HistoryEntry, new: HistoryEntry, num_cached: int, page_size: int) -> bool:
    """True if the new request read every whole page that the old one left in the cache."""
    if common_prefix(old.prompt.ids, new.prompt.ids) < old.num_reusable_tokens:
        return False
    usable = min(old.num_reusable_tokens, len(new.prompt.ids) - 1) // page_size * page_size
    return 0 < usable <= num_cached


def _first_differing_index(old: Sequence[str], new: Sequence[str]) -> int:
    """The first index at which two lists differ; the shorter length if one extends the other."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(old), len(new)))


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """What a request reused of an earlier one, for the cache diagnostics of both APIs."""

    difference: PromptDifference | None  # None: the prompt extends the earlier one
    is_fully_reused: bool  # it read every whole page that the earlier request left in the cache
    num_reusable_tokens: int  # of the earlier prompt


class RequestHistory:
    """Entries by tenant and response id; bounded in number, tokens and age.

    Args:
        clock: monotonic, in seconds.
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

        Over a limit, forget the oldest entry of the tenant that has the most.
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
        """The request that `tenant` sent for this response; None if unknown or expired."""
        self._expire()
        own = self._entries.get(tenant)
        entry = None if own is None else own.get(response_id)
        return None if entry is None else entry[1]

    def forget(self, tenant: str, response_id: str) -> bool:
        """Forget a request; returns whether it was remembered."""
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
