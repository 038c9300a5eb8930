"""Limits of a JSON body that are checked before it is decoded.

Decoding holds the interpreter lock, and with it the event loop, for a time that depends on the
number of values: 0.2 to 0.3 µs for a list, an object or a key, 0.05 µs for another value. At the
limits that is 10 to 50 ms; 9 million empty lists took 2 to 8 s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ramify.server.errors import ApiError

MAX_DEPTH = 64  # of nested brackets
MAX_CONTAINERS = 50_000  # lists and objects
MAX_STRINGS = 300_000  # keys too: `logit_bias` may have an entry for each token of a vocabulary
MAX_VALUES = 1_000_000  # as many token ids may be in a body
SLICE = 1 << 18  # bytes that are looked at together


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Counts of a JSON text, up to where the first limit is exceeded."""

    depth: int
    num_containers: int
    num_strings: int
    num_commas: int  # at least the number of values, less one for each container

    def excess(self) -> str | None:
        """The limit that a body exceeds, as "has more than 3 strings"; None if it exceeds none."""
        if self.depth > MAX_DEPTH:
            return f"is nested more than {MAX_DEPTH} levels deep"
        for count, limit, name in (
            (self.num_containers, MAX_CONTAINERS, "lists and objects"),
            (self.num_strings, MAX_STRINGS, "strings"),
            (self.num_commas, MAX_VALUES, "values"),
        ):
            if count > limit:
                return f"has more than {limit} {name}"
        return None


def check_json_limits(
    body: bytes | bytearray,
    *,
    what: str = "the body",
    hint: str = "send less",
    param: str | None = None,
) -> None:
    """Raise ApiError 400 for JSON with too many values, or nested too deep.

    Args:
        what, hint, param: for the error: what the JSON is, the way out, and the request's field.
    """
    is_small = (
        len(body) <= SLICE  # counting in more holds the interpreter lock for milliseconds
        and body.count(b"[") + body.count(b"{") <= MAX_DEPTH
        and body.count(b'"') <= MAX_STRINGS
        and body.count(b",") <= MAX_VALUES
    )
    excess = None if is_small else json_shape(body).excess()
    if excess is not None:
        raise ApiError(400, f"{what} {excess}; {hint}", param=param)


def json_shape(body: bytes | bytearray) -> JsonShape:
    """Count brackets and commas outside of strings, and strings.

    Exact for JSON; for other bytes the counts are meaningless. Vectorised, in slices: numpy
    releases the interpreter lock, and no array is large.
    """
    depth = deepest = num_containers = num_quotes = num_commas = position = 0
    while position < len(body):
        is_last = position + SLICE >= len(body)
        text = body[position : position + SLICE].replace(b"\\\\", b"__")
        if text.endswith(b"\\") and not is_last:  # it escapes the next slice's first byte
            text = text[:-1]
        position += len(text)
        # Without escapes, every quote that is left begins or ends a string.
        chars = np.frombuffer(text.replace(b'\\"', b"__"), np.uint8)
        quotes = chars == ord('"')
        # The uint8 sum wraps at 256, which keeps its parity.
        outside = (np.cumsum(quotes, dtype=np.uint8) + num_quotes % 2) & 1 == 0
        opens = ((chars == ord("[")) | (chars == ord("{"))) & outside
        closes = ((chars == ord("]")) | (chars == ord("}"))) & outside
        levels = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        deepest = max(deepest, depth + int(levels.max()))
        depth += int(levels[-1])
        num_containers += int(np.count_nonzero(opens))
        num_quotes += int(np.count_nonzero(quotes))
        num_commas += int(np.count_nonzero((chars == ord(",")) & outside))
        shape = JsonShape(deepest, num_containers, num_quotes // 2, num_commas)
        if shape.excess() is not None:
            return shape
    return JsonShape(deepest, num_containers, num_quotes // 2, num_commas)
