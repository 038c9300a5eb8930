"""Normal form of a text: what it says, whatever its white space, Unicode form and order of keys."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

from ramify.analysis.records import TextForm

MAX_WHOLE = 1e15  # beyond, two whole numbers may be one float
_BLANKS = re.compile(r"[ \t\u00a0\u2000-\u200b\u3000\ufeff]+")
_LINE_ENDS = re.compile(r" *(?:\r\n|\r|\n)\s*")


def normalise(text: str, form: TextForm) -> str:
    """Normal form of a segment's text: keys sorted, then white space and Unicode made equal."""
    if form in (TextForm.MEDIA, TextForm.TOKENS):
        return text
    return normalise_spaces(sort_keys(text))


def normalise_spaces(text: str) -> str:
    """Unicode in NFC, runs of blanks as a space, runs of line ends as a line end, no blanks at ends."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if not ("  " in text or "\t" in text or "\r" in text or "\n" in text or not text.isascii()):
        return text.strip()
    return _LINE_ENDS.sub("\n", _BLANKS.sub(" ", text)).strip()


def sort_keys(text: str) -> str:
    """JSON in normal form: keys sorted, whole numbers as such, strings without blanks at their ends.

    In strings of JSON too; other text stays as it is.
    """
    value = parse_json(text)
    return text if value is None else write_json(_sorted(value))


def parse_json(text: str) -> Any:
    """The object or list that a text is the JSON of; None for other texts."""
    head = text.lstrip()[:1]
    if head not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def item_ids(a: str, b: str) -> tuple[str, str] | None:
    """The ids of an API's item in two texts that are equal but for the id, which one may lack."""
    items = parse_json(a), parse_json(b)
    if not all(isinstance(item, dict) and "type" in item for item in items):
        return None
    had, got = (str(item.pop("id", "")) for item in items)
    has_content = any(items[0][name] for name in items[0].keys() - {"type", "status"})
    return (had, got) if had != got and items[0] == items[1] and has_content else None


def write_json(value: object) -> str:
    """Compact JSON with characters as they are."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _sorted(value: Any, depth: int = 0) -> Any:
    if depth > 100:
        return value
    if isinstance(value, dict):
        return {key: _sorted(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item, depth + 1) for item in value]
    if isinstance(value, str) and value[:1] in ("{", "["):
        inner = parse_json(value)
        return value.strip() if inner is None else write_json(_sorted(inner, depth + 1))
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE:
        return int(value)
    return value


def key_orders_differ(a: object, b: object, depth: int = 0) -> bool:
    """Whether an object that both have has its common keys in another order."""
    if depth > 60:
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        common_a = [key for key in a if key in b]
        common_b = [key for key in b if key in a]
        return common_a != common_b or any(
            key_orders_differ(a[key], b[key], depth + 1) for key in common_a
        )
    if isinstance(a, list) and isinstance(b, list):
        return any(key_orders_differ(x, y, depth + 1) for x, y in zip(a, b, strict=False))
    if isinstance(a, str) and isinstance(b, str) and a != b:
        inner_a, inner_b = parse_json(a), parse_json(b)
        return (
            inner_a is not None
            and inner_b is not None
            and key_orders_differ(inner_a, inner_b, depth + 1)
        )
    return False


def list_orders_differ(a: object, b: object, depth: int = 0) -> bool:
    """Whether a list that both have has the same items in another order."""
    if depth > 60 or a == b:
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return any(list_orders_differ(a[key], b[key], depth + 1) for key in a if key in b)
    if isinstance(a, list) and isinstance(b, list):
        if sorted(map(write_json, a)) == sorted(map(write_json, b)):
            return True
        return any(list_orders_differ(x, y, depth + 1) for x, y in zip(a, b, strict=False))
    return False


_STYLES: tuple[dict[str, Any], ...] = tuple(
    {"separators": separators, "indent": indent, "ensure_ascii": is_ascii}
    for is_ascii in (False, True)
    for separators, indent in (
        ((",", ":"), None),
        ((", ", ": "), None),
        ((",", ": "), 2),
        ((",", ": "), 4),
    )
)


def style_of(text: str) -> int:
    """The white space and escapes of JSON, as a number; -1 if they are of no usual kind."""
    value = json.loads(text)
    usual = (at for at, style in enumerate(_STYLES) if json.dumps(value, **style) == text)
    return next(usual, -1)


def write_as(value: object, text: str) -> str | None:
    """JSON of a value in the style of a text; None if that is of no usual kind."""
    style = style_of(text)
    return None if style < 0 else json.dumps(value, **_STYLES[style])
