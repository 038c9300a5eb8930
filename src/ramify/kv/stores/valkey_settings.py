"""What a server's settings mean for a store of pages: told at start, not found out by users."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.kv.stores.valkey_link import Command, Exchange, ReplyError

_NAMES = ("maxmemory-policy", "maxmemory", "proto-max-bulk-len")
# Sent as one pipeline.
QUESTIONS: tuple[Command, ...] = (("PING",), *(("CONFIG", "GET", name) for name in _NAMES))


def refusal(answers: Exchange, record_bytes: int) -> str:
    """Why the server that gave these answers to QUESTIONS cannot store pages; empty: it can."""
    if answers.failure:
        return answers.reason
    first = answers.replies[0]
    if first != b"PONG":
        return first.message if isinstance(first, ReplyError) else "it answers PING with no PONG"
    limit = _settings(answers.replies)["proto-max-bulk-len"]
    if limit is not None and limit.isdecimal() and int(limit) < record_bytes:
        return (
            f"its proto-max-bulk-len is {int(limit)} bytes, a page has {record_bytes}; raise it "
            f"with: CONFIG SET proto-max-bulk-len {2 * record_bytes}"
        )
    return ""


def warning(answers: Exchange) -> str:
    """What its operator should change; empty: nothing."""
    settings = _settings(answers.replies)
    policy, memory = settings["maxmemory-policy"], settings["maxmemory"]
    if policy is None:
        return "its settings cannot be read: make sure that maxmemory-policy is allkeys-lru"
    if policy == "noeviction":
        limit = "no limit of memory" if memory == "0" else f"maxmemory {memory}"
        return (
            f"its maxmemory-policy is noeviction with {limit}: once full it takes no further page; "
            "set maxmemory, and run: CONFIG SET maxmemory-policy allkeys-lru"
        )
    return ""


def _settings(replies: Sequence[object]) -> dict[str, str | None]:
    """Each setting; None: the server does not say."""
    return {
        name: reply[1].decode(errors="replace")
        if isinstance(reply, list) and len(reply) == 2 and isinstance(reply[1], bytes)
        else None
        for name, reply in zip(_NAMES, replies[1:], strict=True)
    }
