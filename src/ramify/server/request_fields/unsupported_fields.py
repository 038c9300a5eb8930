"""Request fields outside of a request's type: refused, ignored by intent, or unknown."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ramify.server.errors import ApiError
from ramify.server.http.body_errors import MissingFieldError
from ramify.server.http.request_body import decode_body, extra_fields
from ramify.server.http.wire import log_safe

logger = logging.getLogger(__name__)

T = TypeVar("T")
PROMPT_FIELDS = ("messages", "prompt", "input")  # each of another API
MAX_NAMED = 20  # unknown fields in a warning
MAX_NAME_CHARS = 64
MAX_LOGGED = 1000  # names, then the log has enough
MAX_VALUE_BYTES = 1024  # no value that changes nothing is longer


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer and is not served.

    Args:
        neutral: values that change nothing, beside null, false and what is empty.
        hint: the way out.
    """

    neutral: tuple[Any, ...] = ()
    hint: str = "leave it out"

    def accepts(self, value: memoryview) -> bool:
        """Whether a value, as JSON, changes nothing."""
        if len(value) > MAX_VALUE_BYTES:
            return False
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):  # text that nothing has decoded so far
            return False
        is_empty = decoded is None or decoded is False or decoded in ("", [], {})
        return is_empty or decoded in self.neutral


@dataclass(frozen=True, slots=True)
class UnsupportedFields:
    """Treatment of the fields that a request type does not have: refused, ignored or unknown.

    Args:
        ignored: change nothing in the answer; no warning.
        refused: are an error, unless their value is neutral.
    """

    ignored: frozenset[str] = field(default_factory=frozenset)
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def unknown(self, fields: Mapping[str, msgspec.Raw]) -> list[str]:
        """The names of the fields that are neither ignored nor refused.

        Args:
            fields: those that the request type does not have, with their values as JSON.

        Raises:
            ApiError: 400, a refused field has a value that is not neutral.
        """
        for name, value in fields.items():
            refused = self.refused.get(name)
            if refused is not None and not refused.accepts(memoryview(value)):
                raise ApiError(400, f"{name} is not served; {refused.hint}", param=name)
        return [name for name in fields if name not in self.ignored and name not in self.refused]


def decode_request(
    body: bytes | bytearray, kind: type[T], unsupported: UnsupportedFields | None
) -> tuple[T, list[str]]:
    """Decode a body to a request type; returns the names of its unknown fields as well.

    Args:
        unsupported: None looks for no other fields.

    Raises:
        ApiError: 400, it does not fit the type, or has a refused field.
    """
    try:
        request = decode_body(body, kind)
    except MissingFieldError:
        if (
            unsupported is not None
        ):  # a field of another API says more than the one that it stands for
            fields = extra_fields(body, kind)
            unsupported.unknown({name: fields[name] for name in PROMPT_FIELDS if name in fields})
            unsupported.unknown(fields)
        raise
    return request, [] if unsupported is None else unsupported.unknown(extra_fields(body, kind))


def unknown_warning(names: Sequence[str]) -> str:
    """The warning that names unknown fields."""
    shown = [name[:MAX_NAME_CHARS] for name in names[:MAX_NAMED]]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"unknown fields are ignored: {', '.join(shown)}{more}"


class UnknownFieldLog:
    """Logs each unknown field once: `MAX_NAMED` of a request, and `MAX_LOGGED` in all."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def report(self, names: Sequence[str], path: str) -> None:
        """Log the names that were not logged before, with the path of the request."""
        for name in names[:MAX_NAMED]:
            shown = log_safe(name[:MAX_NAME_CHARS])
            if shown not in self._names and len(self._names) < MAX_LOGGED:
                self._names.add(shown)
                logger.warning("unknown field %s in a request to %s is ignored", shown, path)
