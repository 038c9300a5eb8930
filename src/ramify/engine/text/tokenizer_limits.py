"""Limits of a `tokenizer.json`: what it may add to a text, and to a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# Of real models: some 65,000 tokens for sounds, 30 special tokens around a text.
MAX_ADDED_TOKENS = 100_000
MAX_TEMPLATE_TOKENS = 1000
MAX_TOKEN_ID = 2**31 - 1
MAX_GROWTH = 64  # characters that a normalizer or decoder may make of one


class _Parts(msgspec.Struct):
    """The parts of the file that are checked; the vocabulary is skipped."""

    added_tokens: list[msgspec.Raw] | None = None
    normalizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_tokenizer_json(data: bytes) -> None:
    """Raise ValueError for a tokenizer with which loading or encoding takes unbounded time or memory."""
    parts = msgspec.json.decode(data, type=_Parts)
    num_added = len(parts.added_tokens or ())
    if num_added > MAX_ADDED_TOKENS:
        raise ValueError(
            f"it has {num_added:,} added tokens, at most {MAX_ADDED_TOKENS:,} are read"
        )
    for name in ("normalizer", "decoder"):
        growth = _growth(getattr(parts, name))
        if growth > MAX_GROWTH:
            raise ValueError(
                f"its {name} may write more than {MAX_GROWTH} characters for one, so that a short text "
                "fills the memory"
            )
    ids = list(_ids(parts.post_processor))
    if len(ids) > MAX_TEMPLATE_TOKENS:
        raise ValueError(f"its post_processor adds {len(ids):,} tokens to a text")
    wrong = next((number for number in ids if not 0 <= number <= MAX_TOKEN_ID), None)
    if wrong is not None:
        raise ValueError(f"its post_processor adds the token id {wrong}, which no vocabulary has")


def _growth(part: Any) -> float:
    """At most as many characters as a part of a pipeline makes of one, one after the other."""
    if not isinstance(part, Mapping):
        return 1
    inner = [*_list(part.get("normalizers")), *_list(part.get("decoders"))]
    growth = 1.0
    for step in inner:
        growth *= _growth(step)
    if part.get("type") == "Replace":
        pattern, content = part.get("pattern"), str(part.get("content", ""))
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        # A regular expression may match each character, or between any two.
        growth *= max(1.0, len(content) / len(text) if text else len(content) + 1)
    if part.get("type") == "Prepend":
        growth *= 1 + len(str(part.get("prepend", "")))
    return growth


def _ids(part: Any) -> Iterator[int]:
    """Token ids that a post-processor names."""
    if isinstance(part, Mapping):
        for value in part.values():
            yield from _ids(value)
        ids = part.get("ids")
        yield from (number for number in _list(ids) if isinstance(number, int))
        for name in ("sep", "cls"):
            pair = _list(part.get(name))
            yield from (number for number in pair if isinstance(number, int))
    elif isinstance(part, list):
        for value in part:
            yield from _ids(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
