"""What earlier requests asked, so that a later one can be told what it changed."""

from __future__ import annotations

import json
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ramify.server.prompts import Prompt, common_prefix

MAX_RECORDS = 4096
MAX_TOKENS = 8_000_000  # of all prompts that are remembered: 32 MB
TTL_S = 24 * 3600.0


def canonical(value: object) -> str:
    """A value as text in which order matters only where it does in JSON: in lists."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its prompt was made of it; the first five fields are compared."""

    model: str
    options: Mapping[str, str]  # what else changes the prompt, by the API's name for it
    tools: tuple[str, ...]  # canonical
    system: str  # canonical; "" where the API has none
    messages: tuple[str, ...]  # canonical
    prompt: Prompt
    response: object = None  # of the Responses API: what its next turn is made from
    paths: tuple[str, ...] = ()  # of the messages, where they are not `messages[i]`
    num_kept: int | None = (
        None  # tokens that were kept for others; None: what the next turn has too
    )

    @property
    def reusable(self) -> int:
        """Tokens that a later request could have read."""
        return self.prompt.stable_len if self.num_kept is None else self.num_kept

    def path_of(self, message: int) -> str:
        """The name of a message in the API that it came by."""
        return self.paths[message] if message < len(self.paths) else f"messages[{message}]"


@dataclass(frozen=True, slots=True)
class Change:
    """The first thing in which a request differs from an earlier one, in the order of a prompt."""

    kind: str  # "model", "tools", "system", "messages", or a name of `Record.options`
    path: str  # of the first part that differs
    at_token: int  # prompts are the same up to here
    missed_tokens: int  # of the earlier prompt, beyond it


def first_change(old: Record, new: Record) -> Change | None:
    """What keeps the new request from beginning as the old one; None if nothing does.

    Messages that were only added are no change.
    """
    same = common_tokens(old.prompt.ids, new.prompt.ids)

    def change(kind: str, path: str) -> Change:
        return Change(kind, path, same, max(0, old.reusable - same))

    if old.model != new.model:
        return Change("model", "model", 0, old.reusable)
    if old.tools != new.tools:
        return change("tools", f"tools[{_differs(old.tools, new.tools)}]")
    if old.system != new.system:
        path = new.prompt.path_at(same)
        return change("system", path if path.startswith("system") else "system")
    place = _differs(old.messages, new.messages)
    if place < len(old.messages):
        whole = (new if place < len(new.messages) else old).path_of(place)
        path = new.prompt.path_at(same) if place < len(new.messages) else whole
        return change("messages", path if path.startswith(whole) else whole)
    for name in sorted(old.options.keys() | new.options.keys()):
        if old.options.get(name) != new.options.get(name):
            return change(name, name)
    return None


def is_reused(old: Record, new: Record, num_cached: int, page_size: int) -> bool:
    """Whether all whole pages that the old request left were there for the new one."""
    if common_tokens(old.prompt.ids, new.prompt.ids) < old.reusable:
        return False
    usable = min(old.reusable, len(new.prompt.ids) - 1) // page_size * page_size
    return 0 < usable <= num_cached


def common_tokens(one: array[int], other: array[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return common_prefix(one, other)


def _differs(old: Sequence[str], new: Sequence[str]) -> int:
    """The first place at which two lists differ, one being shorter included."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))


class RecordStore:
    """Records by tenant and id of the response; bounded in number, tokens and age.

    Args:
        clock: seconds, never going back.
    """

    def __init__(
        self,
        *,
        max_records: int = MAX_RECORDS,
        max_tokens: int = MAX_TOKENS,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_records, self.max_tokens, self.ttl_s = max_records, max_tokens, ttl_s
        self._clock = clock
        self._records: dict[str, OrderedDict[str, tuple[float, Record]]] = {}  # by tenant
        self._num_tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def put(self, tenant: str, response_id: str, record: Record) -> None:
        """Remember a request under the id of its response.

        When there are too many, the oldest of the tenant goes that has most.
        """
        self.forget(tenant, response_id)
        own = self._records.setdefault(tenant, OrderedDict())
        own[response_id] = (self._clock() + self.ttl_s, record)
        self._num_tokens[tenant] = self._num_tokens.get(tenant, 0) + len(record.prompt.ids)
        while sum(self._num_tokens.values()) > self.max_tokens:
            self._forget_oldest(max(self._num_tokens, key=lambda name: self._num_tokens[name]))
        while len(self) > self.max_records:
            self._forget_oldest(max(self._records, key=lambda name: len(self._records[name])))

    def get(self, tenant: str, response_id: str) -> Record | None:
        """The request of that response, if this tenant made it and it is still remembered."""
        self._expire()
        own = self._records.get(tenant)
        entry = None if own is None else own.get(response_id)
        return None if entry is None else entry[1]

    def forget(self, tenant: str, response_id: str) -> bool:
        """Drop one; whether it was there."""
        own = self._records.get(tenant)
        entry = None if own is None else own.pop(response_id, None)
        if own is None or entry is None:
            return False
        self._num_tokens[tenant] -= len(entry[1].prompt.ids)
        if not own:
            del self._records[tenant], self._num_tokens[tenant]
        return True

    def _forget_oldest(self, tenant: str) -> None:
        self.forget(tenant, next(iter(self._records[tenant])))

    def _expire(self) -> None:
        now = self._clock()
        for tenant in list(self._records):
            while (own := self._records.get(tenant)) and next(iter(own.values()))[0] <= now:
                self._forget_oldest(tenant)
