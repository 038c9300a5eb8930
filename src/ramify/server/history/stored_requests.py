"""`HistoryEntry`: a recent request with its prompt; the first difference between two of them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ramify.server.history.expiring_store import Sized
from ramify.server.prompts.next_turns import common_prefix
from ramify.server.prompts.renderer import RenderedPrompt

ENTRY_BYTES = 1024  # objects of an entry, whatever it holds

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


def fingerprint(value: object) -> str:
    """A digest that is equal for equal JSON values: objects have no order, lists have."""
    return hashlib.blake2b(_encode_sorted(value), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """A request with its prompt. `first_difference` compares the first five fields.

    Fields that are only compared are a `fingerprint`, so that an entry has the size of its token ids.
    It is stored by the id of its response, `without_text`.
    """

    model: str
    options: Mapping[str, str]  # further request fields that may change the prompt, by name
    tools: tuple[str, ...] = ()  # as `fingerprint`
    system: str = ""  # as `fingerprint`; "" where the API has none
    messages: tuple[str, ...]  # as `fingerprint`
    prompt: RenderedPrompt
    response: Sized | None = None  # Responses API: what a next turn continues or a client fetches
    paths: tuple[str, ...] = ()  # request fields of the messages, if not `messages[i]`
    max_shared: int | None = None  # tokens that may stay cached for others; None: all

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens that a later request could have read from the cache."""
        return self.prompt.num_stable_tokens if self.max_shared is None else self.max_shared

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, by what the entry alone refers to."""
        texts = (self.model, self.system, *self.tools, *self.messages, *self.paths)
        options = (*self.options, *self.options.values())
        response = 0 if self.response is None else self.response.num_bytes
        num_bytes = sum(map(sys.getsizeof, (*texts, *options, self.prompt.text, self.prompt.ids)))
        return ENTRY_BYTES + num_bytes + response

    def without_text(self) -> HistoryEntry:
        """The entry without the prompt's text and segments, which no later request needs."""
        stable = self.prompt.num_stable_tokens
        return replace(self, prompt=RenderedPrompt(self.prompt.ids, num_stable_tokens=stable))

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
    """First difference of a prompt from an earlier one; None if it extends that.

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
    """True if the new request read every whole page that the old one left in the cache.

    Of a prompt that extends the old one, those that the template still writes as before: it may drop
    reasoning before a new question.
    """
    num_common, num_reusable = (
        common_prefix(old.prompt.ids, new.prompt.ids),
        old.num_reusable_tokens,
    )
    if num_common < num_reusable:
        if first_difference(old, new) is not None:
            return False
        num_reusable = num_common
    usable = min(num_reusable, len(new.prompt.ids) - 1) // page_size * page_size
    return 0 < usable <= num_cached


def _first_differing_index(old: Sequence[str], new: Sequence[str]) -> int:
    """The first index at which two lists differ; the shorter length if one extends the other."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(old), len(new)))


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Comparison of a request with an earlier one, for the cache diagnostics of both APIs."""

    difference: PromptDifference | None  # None: the prompt extends the earlier one
    is_fully_reused: bool  # it read every whole page that the earlier request left in the cache
    num_reusable_tokens: int  # of the earlier prompt
