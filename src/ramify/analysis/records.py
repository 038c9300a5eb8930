"""Requests of a log in one form, whatever the format.

A prompt is a sequence of segments in the order settings, tools, system, messages. A segment's path is
its place in the body as sent: `settings.tool_choice`, `tools[3]`, `system`, `system[0]`,
`messages[4]`, `messages[4].content[1]`, `messages[4].tool_calls[0]`; `prompt` for a prompt without
messages.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from itertools import takewhile
from operator import itemgetter


class SegmentKind(StrEnum):
    """Part of the prompt that a segment belongs to, in the order of the prompt."""

    SETTING = "setting"
    TOOL = "tool"
    SYSTEM = "system"
    MESSAGE = "message"


class TextForm(StrEnum):
    """How the text of a segment is to be read."""

    TEXT = "text"
    JSON = "json"  # compact, keys in the order of the body, without `cache_control`
    MEDIA = "media"  # a digest of an image, audio or document
    TOKENS = "tokens"  # token ids as decimal numbers with a space between


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt that is compared with the same part of other prompts."""

    path: str
    kind: SegmentKind
    text: str
    form: TextForm = TextForm.TEXT
    label: str = ""  # role, name and call id, which the model reads beside the text
    breakpoint_ttl_s: float | None = None  # lifetime asked for by a cache breakpoint at its end


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt of which only the ids of its blocks are known; equal ids mean equal prefixes.

    Ids may be any integers; they are stored as signed 64-bit ones, so that arrays can hold them.
    """

    block_size: int  # tokens in a block; the last block may have fewer
    block_ids: tuple[int, ...]
    num_tokens: int
    # First token and path of the fields that the tokens came from, in the order of the prompt.
    segments: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        ids = self.block_ids
        if ids and not (min(ids) >= -(1 << 63) and max(ids) < 1 << 63):
            object.__setattr__(self, "block_ids", tuple(map(_as_int64, ids)))

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """Ids of the blocks that are full; what a partial block holds is not known of two prompts."""
        return self.block_ids[: self.num_tokens // self.block_size]

    def num_shared(self, other: HashedPrompt) -> int:
        """Tokens of the full blocks that both prompts begin with."""
        if self.block_size != other.block_size:
            return 0
        pairs = zip(self.full_blocks, other.full_blocks, strict=False)
        return self.block_size * sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def path_at(self, token: int) -> str:
        """Path of the field that a token came from; empty where the log does not say it."""
        at = bisect_right(self.segments, token, key=itemgetter(0))
        return self.segments[at - 1][1] if at else ""


def _as_int64(number: int) -> int:
    """The signed integer with the same 64 bits; of a longer one, a hash of 64 bits."""
    if -(1 << 63) <= number < 1 << 64:
        return number - (1 << 64) if number >= 1 << 63 else number
    # Not `hash(number)`, which is its remainder: 1 << 64 would be equal to 8.
    data = number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that the server billed; None is unknown, never 0."""

    num_input: int | None = None  # all input tokens, with those read from the cache and written
    num_read: int | None = None
    num_written: int | None = None  # to a cache whose writes are billed
    num_written_1h: int | None = None  # of those, with a lifetime of an hour
    num_output: int | None = None


@dataclass(frozen=True, slots=True)
class VendorVerdict:
    """A vendor's own reason for a miss, as `messages_changed`; its estimate of the tokens missed."""

    reason: str
    num_missed: int | None = None
    segment: str = ""  # path of the first field that was missed


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request for a model's answer.

    Times are seconds since the epoch, or since the log's start if it has no dates. Whoever shares no
    cache has another `cache_scope`: a tenant, an adapter, a salt.
    """

    file: str
    line: int  # from 1, bad lines included; the first of a response that several lines hold
    index: int | None = None  # among several requests of a line
    segments: tuple[Segment, ...] = ()
    output: tuple[Segment, ...] = ()  # the answer, where the log has it
    hashed: HashedPrompt | None = None
    request_id: str | None = None
    conversation: str | None = None
    parent_id: str | None = None  # request_id of the previous turn
    history_id: str | None = None  # response or conversation that the server puts before `segments`
    start_s: float | None = None
    first_output_s: float | None = None
    end_s: float | None = None
    # openai-chat, openai-completions, openai-responses, anthropic-messages, gemini
    api: str | None = None
    provider: str | None = None  # openai, anthropic, deepseek, ramify, vllm, sglang, gemini, …
    model: str | None = None
    response_model: str | None = None
    cache_scope: str = ""
    cache_key: str | None = None  # routing hint, as `prompt_cache_key`
    retention_s: float | None = None  # lifetime that the body asks for, for all it writes
    template: str | None = None  # name and version of the prompt's template, as support@7
    replica: str | None = None  # deployment or server that answered
    is_batch: bool = False  # one of a batch, in which neither order nor times are known
    has_full_text: bool = True  # False: cut, redacted, or parts of the prompt are not logged
    usage: Usage = field(default_factory=Usage)
    verdict: VendorVerdict | None = None
