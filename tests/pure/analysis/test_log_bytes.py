"""Files damaged at any byte: no crash, and every line that cannot be decoded is reported."""

import gzip
import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ramify.analysis.files.json_documents import RawValue, document_values
from ramify.analysis.files.json_values import json_values
from ramify.analysis.files.log_stream import numbered_lines
from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers.nested_json import decode_json

OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    min_size=1,
    max_size=4,
)
BYTES = [
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b",",
    b":",
    b"\n",
    b"\r",
    b" ",
    b"0",
    b"\xff",
    b"\x00",
]


class Dripping(io.BytesIO):
    """Bytes that come few at a time, as from a slow pipe."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def readinto(self, buffer: Any, /) -> int:
        return super().readinto(memoryview(buffer)[: self._size])


def documents(data: bytes, size: int, **options: int) -> list[RawValue]:
    """The values of documents whose bytes come few at a time."""
    return list(document_values(io.BufferedReader(Dripping(data, size), 1), **options))  # type: ignore[arg-type]


@given(
    rows=st.lists(OBJECTS, min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_values_are_split_wherever_the_data_breaks(
    rows: list[dict[str, Any]], indent: int | None, is_ascii: bool, size: int
) -> None:
    """Brackets and quotes inside strings split nothing; lines count from the start of a value."""
    text = json.dumps(rows, indent=indent, ensure_ascii=is_ascii)
    data = text.encode("utf-8", "surrogatepass")

    values = documents(data, size)
    recognised = list(json_values(io.BufferedReader(io.BytesIO(data)), lambda _: False))

    assert [item.value for item in values] == [item.value for item in recognised] == rows
    assert [item.line for item in values] == [item.line for item in recognised]
    assert all(item.error is None for item in values)
    if indent == 2:
        lines = text.split("\n")
        assert [item.line for item in values] == [
            number for number, line in enumerate(lines, 1) if line in {"  {", "  {},", "  {}"}
        ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        OBJECTS.map(lambda row: json.dumps(row).encode())
        | st.lists(st.sampled_from(BYTES), max_size=12).map(b"".join),
        max_size=8,
    ).map(b"\n".join),
    is_compressed=st.booleans(),
)
@example(lines=b'[{"a": 1}, {"b": "\n{"c": 2}', is_compressed=False)
@example(lines=b'{"data": [{"a": 1},\n{"b"', is_compressed=False)
@example(lines=b'{"log": {"entries": [}', is_compressed=False)
def test_lines_are_rows_or_reported(tmp_path: Path, lines: bytes, is_compressed: bool) -> None:
    """A line that is neither blank nor a value nor inside one is in `bad_lines`, once."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(gzip.compress(lines) if is_compressed else lines)
    quality = ReadQuality()

    requests = list(read_log(path, quality=quality))

    numbers = [line for _, line in quality.bad_lines]
    assert all(1 <= line <= lines.count(b"\n") + 1 for line in numbers)
    assert len(requests) == quality.num_requests
    if lines.strip() and not quality.num_rows:
        assert numbers or quality.skipped or not lines.strip(b"[], \n\r\t")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(OBJECTS, min_size=1, max_size=6),
    broken=st.sets(st.integers(0, 5)),
)
def test_every_broken_line_between_whole_ones_is_reported(
    tmp_path: Path, rows: list[dict[str, Any]], broken: set[int]
) -> None:
    """Cut lines are bad, with their number, and no whole line beside them is."""
    texts = [json.dumps(row) for row in rows]
    cut = [text[:-1] if number in broken else text for number, text in enumerate(texts)]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(cut) + "\n")
    quality = ReadQuality()

    list(read_log(path, quality=quality))

    assert [line for _, line in quality.bad_lines] == sorted(
        number + 1 for number in broken if number < len(rows)
    )
    assert quality.num_rows == len(rows) - len(quality.bad_lines)


def test_lines_over_the_limit_are_skipped() -> None:
    """A line that is longer than the limit is bad, and the next is read."""
    data = json.dumps({"a": "x" * 300}).encode() + b'\n{"b": 1}\n'

    lines = numbered_lines(io.BufferedReader(io.BytesIO(data)), max_bytes=100)

    assert list(lines) == [(1, None), (2, b'{"b": 1}')]


@pytest.mark.parametrize("size", [70, 500])
def test_a_value_over_the_limit_ends_its_document(size: int) -> None:
    """Whether it is a list, an object or a string that does not end: memory holds the limit."""
    data = b'[{"a": 1},\n{"b": "' + b"word " * 20_000 + b'"}, {"c": 1}]'

    values = documents(data, size, max_chars=10_000)

    assert [(item.line, item.value) for item in values] == [(1, {"a": 1}), (2, None)]
    assert str(values[1].error).startswith("longer than")


@pytest.mark.parametrize("size", [1, 7, 500])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"a": {\n"b": 1,\n"c": }}\n', 3),
        ('{"a": [1,\n"b\n"]}', 2),
        ('{"a": 1\n', 1),
        ('{"a": 1}\n{"a" 1}\n\n', 2),
        ('{"data": [{"a": 1}\n{"a": 1}]}', 2),
        ('{"data": [],\n "a": 1,\n}', 3),
        ('[{"a": 1},\n' + "[" * 100_000, 2),
        ('[{"a": 1},\n{"b": "\n\n"}]', 2),
    ],
)
def test_a_broken_document_is_told_with_the_line_where_it_breaks(
    text: str, line: int, size: int
) -> None:
    """What comes before the break is read, nothing after it."""
    *_, last = documents(text.encode(), size)

    assert last.line == line
    assert str(last.error).endswith("the rest of the document is not read")


def test_deep_nesting_is_an_error_of_values() -> None:
    """A million brackets end in ValueError, whatever the limit of recursion."""
    for text in ("[" * 1_000_000, '{"a":' * 1_000_000, "[" * 5000 + "]" * 5000):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting|truncated"):
            decode_json(text.encode())


@pytest.mark.slow
@pytest.mark.parametrize("is_array", [False, True])
def test_memory_is_that_of_a_row_and_not_of_the_file(tmp_path: Path, is_array: bool) -> None:
    """200 MB of requests are read in 60 MB above an empty process, lines or one array on a line."""
    path = tmp_path / "log.json"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "word " * 2000}, {"role": "x", "content": "é\\"}],
    }
    row = json.dumps({"request": body, "response": {"usage": {"prompt_tokens": 2000}}})
    num_rows = 200_000_000 // len(row)
    with path.open("w") as file:
        file.write("[" if is_array else "")
        for number in range(num_rows):
            file.write(", " if is_array and number else "")
            file.write(row + ("" if is_array else "\n"))
        file.write("]" if is_array else "")
    code = textwrap.dedent(
        """
        import resource, sys
        from ramify.analysis.log_files import read_log

        def peak_kb():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        before = peak_kb()
        print(sum(1 for _ in read_log(sys.argv[1])), (peak_kb() - before) / 1024)
        """
    )

    output = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    ).stdout

    num_read, used_mb = output.split()
    assert int(num_read) == num_rows
    assert float(used_mb) < 60


def test_a_line_of_many_megabytes_is_a_row(tmp_path: Path) -> None:
    """40 MB of text with an escape in every word."""
    path = tmp_path / "log.jsonl"
    text = 'word \\ "' * 5_000_000
    path.write_text(json.dumps({"model": "m", "prompt": text}) + "\n{\n")
    quality = ReadQuality()

    (request,) = read_log(path, quality=quality)

    assert request.segments[-1].text == text
    assert [line for _, line in quality.bad_lines] == [2]
