"""The order in which a batch's lines run: lines whose prompts begin alike run after each other.

A key is a chain of checksums over the text of a request in the order of its prompt, `UNIT` bytes each.
Keys of two requests are equal as far as their texts are, so sorted keys walk the tree of prefixes depth
first: whatever the lines of a branch share is computed once and still cached when the next line reads
it, in a pool that holds one branch. A key has a sixteenth of its text's length, so the keys of a whole
input file fit in memory; equal checksums of different texts cost a worse order and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ramify.server.errors import ApiError
from ramify.server.http.json_limits import check_json_limits

UNIT = 64  # bytes of text for each checksum
MAX_UNITS = 4096  # of a key: lines that share more text are equal
_CHECKSUM_BYTES = 4
_LEADING_ROLES = ("system", "developer")


class _PromptFields(msgspec.Struct):
    """The fields of any API that a prompt is made of, not decoded."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    prefix: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")


class _Message(msgspec.Struct):
    role: Any = None


def prefix_key(body: bytes, *, tools_first: bool = False) -> bytes:
    """The sort key of a request's body; empty if it has no such fields.

    Args:
        tools_first: prompts have tools before the system prompt.
    """
    try:
        check_json_limits(body)
        fields = msgspec.json.decode(body, type=_PromptFields)
        return _chained(_texts(fields, tools_first))
    except (ApiError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return b""  # its request fails as well


def _texts(fields: _PromptFields, tools_first: bool) -> Iterator[bytes]:
    """The texts of a request in the order of its prompt."""
    yield bytes(fields.cache_salt)  # others share no pages with it
    yield bytes(fields.prefix)  # the name of a prefix that all else follows
    messages = _items(fields.messages)
    leading: list[bytes] = []
    for message in messages:
        role = msgspec.json.decode(message, type=_Message).role
        if role not in _LEADING_ROLES:
            break
        leading.append(message)
    system = [bytes(fields.system), bytes(fields.instructions), *leading]
    tools = bytes(fields.tools)
    yield from [tools, *system] if tools_first else [*system, tools]
    yield from messages[len(leading) :]
    yield bytes(fields.prompt)
    yield from _items(fields.input) or [bytes(fields.input)]


def _items(value: msgspec.Raw) -> Sequence[bytes]:
    """The items of a JSON list, not decoded; none if it is another value."""
    if not bytes(value).lstrip().startswith(b"["):
        return []
    return [bytes(item) for item in msgspec.json.decode(value, type=list[msgspec.Raw])]


def _chained(texts: Iterator[bytes]) -> bytes:
    """Checksums of each `UNIT` of the texts and of all before it."""
    key, checksum = bytearray(), 0
    for text in texts:
        for start in range(0, len(text), UNIT):
            checksum = zlib.crc32(text[start : start + UNIT], checksum)
            key += checksum.to_bytes(_CHECKSUM_BYTES, "big")
            if len(key) >= MAX_UNITS * _CHECKSUM_BYTES:
                return bytes(key)
    return bytes(key)


def num_answers(body: bytes) -> int:
    """Answers that a request computes at once: `n` for each prompt, or a vector for each input."""
    try:
        fields = msgspec.json.decode(body, type=_PromptFields)
        n = msgspec.json.decode(fields.n) if bytes(fields.n) else 1
        prompts = max(_num_prompts(fields.prompt), _num_prompts(fields.input))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 1
    return prompts * n if isinstance(n, int) and 1 <= n <= MAX_UNITS else prompts


def _num_prompts(value: msgspec.Raw) -> int:
    """Prompts of a field that may be a text, token ids, or a list of either."""
    items = _items(value)
    return len(items) if items and items[0][:1] in b'"[' else 1
