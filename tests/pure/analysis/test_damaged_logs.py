"""Logs of every format, in every container, damaged at random bytes."""

import csv
import io
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from tests.pure.analysis.planted_formats import FORMATS as PLANTED
from tests.pure.analysis.test_format_fuzz import BY_HAND, rows_of

NOT_READ = "the rest of the document is not read"
PIECES = [
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\n", b"\r", b"\t", b"\x00", b"\xff", b"null",
    b"NaN", b"-1", b"1e999", b"true", b'"\\ud800"', b'{"a":1}',
]  # fmt: skip


def table(rows: list[Any]) -> str:
    names = sorted({name for row in rows if isinstance(row, dict) for name in row})
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        cells = row if isinstance(row, dict) else {}
        writer.writerow(
            {
                key: json.dumps(item) if isinstance(item, dict | list) else item
                for key, item in cells.items()
            }
        )
    return text.getvalue()


CONTAINERS: dict[str, Callable[[list[Any]], str]] = {
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "array": json.dumps,
    "pretty": lambda rows: json.dumps(rows, indent=2),
    "document": lambda rows: json.dumps({"x": [1], "data": rows}, indent=1),
    "on one line": lambda rows: json.dumps({"data": rows}),
    "table": table,
}


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A few bytes inserted, deleted, replaced or doubled; sometimes the end cut."""
    copy = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at, to = sorted((rng.randrange(len(copy) + 1), rng.randrange(len(copy) + 1)))
        kind = rng.random()
        if kind < 0.35:
            copy[at:at] = rng.choice(PIECES)
        elif kind < 0.55:
            del copy[at : at + rng.choice([1, 1, 3, 50])]
        elif kind < 0.8:
            copy[at : at + 1] = rng.choice(PIECES)
        elif kind < 0.92:
            copy[at:at] = copy[at:to][:300]
        else:
            del copy[at:]
    return bytes(copy)


def can_be_decoded(lines: list[bytes], number: int) -> bool:
    """Whether a line is a value, or a part of a value on at most four lines."""
    for start in range(max(0, number - 3), number + 1):
        for end in range(number + 1, min(len(lines), number + 4) + 1):
            try:
                json.loads(b" ".join(lines[start:end]))
            except (ValueError, RecursionError):
                continue
            return True
    return False


def begins_documents(line: bytes) -> bool:
    """Whether a line is an object or a list and values right behind it: all lines are read so then."""
    text, end, count = line.decode("utf-8", "replace").strip(), 0, 0
    while end < len(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, end)
        except (ValueError, RecursionError):
            return False
        end, count = len(text) - len(text[end:].lstrip()), count + 1
    return count > 1 and text[0] in "{["


def check(path: Path, data: bytes, container: str) -> None:
    """Read a damaged file: in time, with lines that exist, every broken one among `bad_lines`.

    Of a document, and of lines whose first one goes on in the next, only the place of the break is
    told, beside the rows before it that decode and have no request.
    """
    path.write_bytes(data)
    quality = ReadQuality()
    lines = data.split(b"\n")
    start = time.perf_counter()

    requests = list(read_log(path, quality=quality))

    assert time.perf_counter() - start < 20
    bad = {line for _, line in quality.bad_lines}
    assert bad <= set(range(1, len(lines) + 1))
    assert {request.line for request in requests} <= set(range(1, len(lines) + 1))
    breaks = [number for reason, number in quality.bad_reasons.items() if NOT_READ in reason]
    if breaks:  # a document, or the first line was torn
        assert breaks == [1]
        assert quality.bad_reasons.keys().isdisjoint({"no JSON", "no UTF-8"})  # rows that decode
    elif container == "lines" and begins_documents(lines[0]):
        assert bad == set()  # a document that breaks would be told as such
    elif container == "lines" and not any(line.strip() in {b"{", b"["} for line in lines):
        broken = [
            number
            for number, line in enumerate(lines, 1)
            if line.strip() and number not in bad and not can_be_decoded(lines, number - 1)
        ]
        assert not [number for number in broken if not spans(lines, bad, number)]


def spans(lines: list[bytes], bad: set[int], number: int) -> bool:
    """Whether an array that begins in a bad line may have taken a line as its own."""
    return any(b"[{" in lines[start - 1][:8] for start in bad if start < number)


@pytest.mark.parametrize("name", [*BY_HAND, *PLANTED])
def test_damaged_files_are_read_to_the_end(tmp_path: Path, name: str) -> None:
    """No crash, no hang, and no broken line that is not reported."""
    rng = random.Random(name)
    rows = rows_of(name, tmp_path)[:6]

    for container, write in CONTAINERS.items():
        data = write(rows).encode("utf-8", "surrogatepass")
        suffix = "csv" if container == "table" else "json"
        for _ in range(8):
            check(tmp_path / f"log.{suffix}", damaged(rng, data), container)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BY_HAND, *PLANTED])
def test_many_damaged_files_are_read_to_the_end(tmp_path: Path, name: str) -> None:
    """As above, with 2,000 files of each format."""
    rng = random.Random(f"many {name}")
    rows = rows_of(name, tmp_path)[:6]

    for number in range(2000):
        container = rng.choice([*CONTAINERS])
        data = CONTAINERS[container](rows).encode("utf-8", "surrogatepass")
        suffix = "csv" if container == "table" else "json"
        check(tmp_path / f"log{number % 4}.{suffix}", damaged(rng, data), container)
