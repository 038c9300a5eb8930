"""Lines of a server's log inside what collectors write around them.

Docker's JSON, CRI's text, exports of Loki, Cloud Logging and CloudWatch. Docker and the CRI cut a long
line into pieces, which are joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.analysis.files.json_documents import RawValue
from ramify.analysis.readers.nested_json import decode_json

MAX_LINE_CHARS = 1 << 26  # of the joined pieces of a line
# Docker cuts at 16 KiB; a shorter line without its end is whole, and its collector has taken the end off.
MIN_PIECE_BYTES = 1 << 14
_CRI = re.compile(
    r"(\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d)) (stdout|stderr) ([FP])(?::\S{0,40})? (.*)",
    re.DOTALL,
)
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp")
# By collector: the key of a line, and keys beside it without which the row is another's.
_LINES = (
    ("log", ("stream",)),
    ("log", ("kubernetes",)),
    ("line", ("labels",)),
    ("textPayload", ("timestamp",)),
    ("jsonPayload", ("timestamp",)),
    ("message", ("ingestionTime",)),
    ("@message", ("@timestamp",)),
)
_POD_KEYS = ("namespace_name", "pod_name", "container_name")
_LINE_KEYS = frozenset(key for key, _ in _LINES)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line or a piece of it."""

    content: Any  # a text, or a decoded row
    time: Any = None
    source: str = ""  # lines of different ones may stand between the pieces of a line
    is_piece: bool = False


@dataclass(slots=True)
class _Pieces:
    """The pieces of a line so far; of a line that is too long they are dropped."""

    first: RawValue
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0

    def add(self, text: str, max_chars: int) -> None:
        self.num_chars += len(text)
        if self.num_chars <= max_chars:
            self.texts.append(text)
        else:
            self.texts.clear()


def is_cri(line: str) -> bool:
    """Whether a line is one of a container runtime."""
    return _CRI.fullmatch(line) is not None


def unwrapped(
    values: Iterable[RawValue],
    is_row: Callable[[Any], bool],
    *,
    max_chars: int = MAX_LINE_CHARS,
) -> Iterator[RawValue]:
    """The values, and in place of collectors' rows the lines or rows that they hold.

    A line that is no row of a format has the value None: it is another line of the server's log.

    Args:
        values: of a file.
        is_row: whether a format takes a value.
        max_chars: of a line in pieces; a longer one is an error.
    """
    waiting: dict[str, _Pieces] = {}
    for value in values:
        lines = None if value.error is not None else _lines_of(value.value)
        if lines is None or (isinstance(value.value, dict) and _is_own_row(value.value, is_row)):
            yield value
            continue
        for number, line in enumerate(lines):
            place = value if len(lines) == 1 else replace(value, index=number)
            content = line.content
            pieces = waiting.get(line.source)
            if isinstance(content, str) and (line.is_piece or pieces is not None):
                pieces = waiting.setdefault(line.source, _Pieces(place))
                pieces.add(content, max_chars)
                if line.is_piece:
                    continue
                yield _joined(waiting.pop(line.source), line.time, is_row, max_chars)
            else:
                yield _value_of(place, content, line.time, is_row)
    for pieces in waiting.values():
        yield _joined(pieces, None, is_row, max_chars)


def _is_own_row(value: dict[str, Any], is_row: Callable[[Any], bool]) -> bool:
    """Whether a format takes the row itself, not for a line that it holds."""
    rest = {key: item for key, item in value.items() if key not in _LINE_KEYS}
    return is_row(rest)


def _joined(pieces: _Pieces, time: Any, is_row: Callable[[Any], bool], max_chars: int) -> RawValue:
    if pieces.num_chars > max_chars:
        error = f"longer than {max_chars:,} characters in pieces"
        return replace(pieces.first, value=None, error=error, is_text=False)
    return _value_of(pieces.first, "".join(pieces.texts), time, is_row)


def _value_of(place: RawValue, content: Any, time: Any, is_row: Callable[[Any], bool]) -> RawValue:
    """A line as a row, with the collector's time where it has none of its own."""
    if isinstance(content, str):
        content = content.rstrip("\n")
        if content.lstrip()[:2] in {'{"', "{}"}:
            try:
                content = decode_json(content)
            except ValueError:
                return replace(place, value=None, error="no JSON", is_text=False)
    if isinstance(content, dict):
        if time is not None and not any(key in content for key in _TIME_KEYS):
            content = {**content, "timestamp": time}
        return replace(place, value=content, is_text=False)
    timed = {"message": content, "timestamp": time}
    if is_row(timed):
        return replace(place, value=timed, is_text=False)
    is_text = isinstance(content, str) and is_row(content)
    return replace(place, value=content if is_text else None, is_text=is_text)


def _lines_of(value: Any) -> list[_Line] | None:
    """What a collector's row holds; None for any other value."""
    if isinstance(value, str):
        match = _CRI.fullmatch(value)
        return match and [_Line(match[4], match[1], match[2], match[3] == "P")]
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("events"), list) and "searchedLogStreams" in value:
        rows = (event for event in value["events"] if isinstance(event, dict))
        return [line for event in rows for line in _lines_of_row(event) or ()]
    data = value.get("data")
    if isinstance(data, Mapping) and data.get("resultType") == "streams":
        return _lines_of_loki(_list(data.get("result")))
    return _lines_of_row(value)


def _lines_of_row(value: Mapping[str, Any]) -> list[_Line] | None:
    for key, beside in _LINES:
        content = value.get(key)
        if isinstance(content, str | dict) and all(name in value for name in beside):
            return [_line(value, content, is_docker=key == "log")]
    return None


def _line(value: Mapping[str, Any], content: Any, *, is_docker: bool) -> _Line:
    time = next((value[key] for key in _TIME_KEYS if key in value), None)
    tag = value.get("logtag")
    is_piece = tag == "P"
    if is_docker and tag is None and "kubernetes" not in value and isinstance(content, str):
        is_piece = not content.endswith("\n") and len(content.encode()) >= MIN_PIECE_BYTES
    if isinstance(content, dict) and isinstance(content.get("message"), str):
        content = content["message"]
    pod = value.get("kubernetes")
    source = (value.get("stream"), *(map(pod.get, _POD_KEYS) if isinstance(pod, dict) else ()))
    return _Line(content, time, repr(source), is_piece)


def _lines_of_loki(streams: Iterable[Any]) -> list[_Line]:
    """The lines of all streams in the order of their times, which are nanoseconds in a text."""
    pairs = [
        (pair[0], pair[1])
        for stream in streams
        if isinstance(stream, dict)
        for pair in _list(stream.get("values"))
        if isinstance(pair, list) and len(pair) >= 2 and isinstance(pair[0], str)
    ]
    pairs.sort(key=lambda pair: (len(pair[0]), pair[0]))
    return [_Line(line, time) for time, line in pairs]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
