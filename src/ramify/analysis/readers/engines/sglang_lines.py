"""Lines of SGLang's request log in its default form, text, as the events of its JSON form.

`Receive: obj=GenerateReqInput(rid='…', text='…', input_ids=[…], …)`, and `Finish: …` with `out={…}`.
"""

from __future__ import annotations

import re
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.engines.python_literals import STRING, integers_at, string_at

_EVENT = re.compile(r"\b(Receive|Finish): obj=\w+ReqInput\(")
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")
# A string with its escapes, a bracket, a comma, or the name of a field.
_TOKEN = re.compile(STRING + r"|[()\[\]{},]|\b\w++=", re.DOTALL)
_COUNTS = re.compile(r"'(prompt_tokens|cached_tokens|completion_tokens)': (\d{1,15})\b")
_LATENCY = re.compile(r"'e2e_latency': (\d{1,9}(?:\.\d{1,20})?)")
_META = "'meta_info': {"
_FIELDS = ("rid", "text", "input_ids", "extra_key", "lora_path", "cache_salt")
_SPLICE = " ... "


def is_sglang_line(text: str) -> bool:
    """Whether a line says that a request was received or finished."""
    return _EVENT.search(text, 0, 4096) is not None


def event_of_line(text: str) -> dict[str, Any]:
    """The event that a line says.

    Raises:
        BadRowError: the line is cut.
    """
    head = _EVENT.search(text)
    assert head is not None
    obj: dict[str, Any] = {}
    fields, end = _fields(text, head.end())
    for name, start in fields.items():
        if not text.startswith("None", start):
            obj[name] = _value(text, start)
    rid = obj.pop("rid", None)
    event: dict[str, Any] = {
        "event": "request.received" if head[1] == "Receive" else "request.finished",
        "rid": rid,
        "obj": obj,
    }
    time = _TIME.search(text, 0, head.start())
    if time is not None:
        event["timestamp"] = time[1].replace(",", ".")
    meta_at = text.rfind(_META, end)
    if meta_at >= 0:
        meta: dict[str, Any] = {
            match[1]: int(match[2]) for match in _COUNTS.finditer(text, meta_at)
        }
        latency = _LATENCY.search(text, meta_at)
        if latency is not None:
            meta["e2e_latency"] = float(latency[1])
        event["out"] = {"meta_info": meta}
    return event


def _fields(text: str, begin: int) -> tuple[dict[str, int], int]:
    """Where the values of fields begin, and where the object ends."""
    fields: dict[str, int] = {}
    depth = 1
    for match in _TOKEN.finditer(text, begin):
        token = match[0]
        if token in ("(", "[", "{"):
            depth += 1
        elif token in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return fields, match.end()
        elif depth == 1 and token[-1] == "=" and token[:-1] in _FIELDS:
            fields.setdefault(token[:-1], match.end())
    raise BadRowError("line ends inside the request")


def _value(text: str, start: int) -> Any:
    """A string, or a list of strings or integers; both halves of what was cut, with dots between."""
    first, end = _literal_at(text, start)
    if not text.startswith(_SPLICE, end):
        return first
    last, _ = _literal_at(text, end + len(_SPLICE))
    if isinstance(first, str) or isinstance(last, str):
        return f"{first}...{last}"
    return [*first, "...", *last]


def _literal_at(text: str, position: int) -> tuple[str | list[Any], int]:
    """The string, or the list of integers or of a batch, at a position; the position behind it."""
    if not text.startswith("[", position):
        return string_at(text, position)
    if text[position + 1 : position + 2] not in ("'", '"', "["):
        return integers_at(text, position)
    items: list[Any] = []
    while not items or text.startswith(", ", position):
        position += 2 if items else 1
        read = integers_at if text.startswith("[", position) else string_at
        item, position = read(text, position)
        items.append(item)
    return items, position + 1
