"""Every format with rows that were cut, mutated or shuffled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import LogFormat, ReadQuality
from ramify.analysis.readers import FORMATS
from tests.budget import examples
from tests.pure.analysis.log_rows import mutate
from tests.pure.analysis.planted_formats import FORMATS as PLANTED
from tests.pure.analysis.planted_formats import planted_log, write_log
from tests.pure.analysis.test_format_claude_code import session
from tests.pure.analysis.test_format_codex import rollout
from tests.pure.analysis.test_format_engines import META, event
from tests.pure.analysis.test_format_hashed import DYNAMO_ROWS, PUBLISHED, RECORD, WEKA_SESSION
from tests.pure.analysis.test_format_sharegpt import ROW

BY_HAND: dict[str, Callable[[], list[Any]]] = {
    "claude-code": lambda: session().lines,
    "codex": lambda: rollout().lines,
    "dynamo": lambda: [json.loads(line) for line in DYNAMO_ROWS.strip().splitlines()],
    "mooncake": lambda: [json.loads(line) for line in PUBLISHED.strip().splitlines()],
    "ramify-record": lambda: [RECORD],
    "sglang": lambda: [
        event("received", "r1", "2026-05-01T10:00:00", {"text": "What?", "sampling_params": {}}),
        event("finished", "r1", "2026-05-01T10:00:02", {"input_ids": [1, 2]}, out={"meta_info": META}),
    ],
    "sharegpt": lambda: [ROW],
    "weka": lambda: [WEKA_SESSION],
}  # fmt: skip


def rows_of(name: str, folder: Path) -> list[Any]:
    """Rows of a format, with names of planted logs as well."""
    if name in BY_HAND:
        return BY_HAND[name]()
    path = folder / f"{name}.jsonl"
    if not path.exists():
        write_log(planted_log(7, name, num_requests=12), name, path, with_noise=False)
    text = path.read_text("utf-8")
    if name.startswith("har"):
        return list(json.loads(text)["log"]["entries"])
    return [json.loads(line) for line in text.splitlines()]


def format_of(value: Any) -> LogFormat | None:
    """The format that reads a row."""
    return next((known for known in FORMATS if known.is_row(value)), None)


@pytest.mark.parametrize("name", [*BY_HAND, *PLANTED])
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_rows_are_read_or_bad(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Rows are requests, skipped or bad, whether the format is recognised or named."""
    folder = Path(tmp_path_factory.getbasetemp()) / "fuzz"
    folder.mkdir(exist_ok=True)
    rows = rows_of(name, folder)
    known = format_of(rows[-1])
    if known is None:
        pytest.skip(f"no reader of {name} yet")
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(rows) - 1))
        rows[index] = mutate(data, rows[index])
    path = folder / f"mutated-{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")

    for chosen in (None, known.name):
        quality = ReadQuality()
        requests = list(read_log(path, format=chosen, quality=quality))

        assert all(1 <= line <= len(rows) for _, line in quality.bad_lines)
        assert all(1 <= request.line <= len(rows) for request in requests)


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*BY_HAND]), data=st.data())
@example(name="mooncake", data=None)
def test_a_file_that_is_cut_anywhere_is_read_up_to_the_cut(
    name: str, tmp_path: Path, data: st.DataObject | None
) -> None:
    """All lines before the cut; the line that is cut is bad, or still a whole value."""
    lines = [json.dumps(row) + "\n" for row in rows_of(name, tmp_path)]
    text = "".join(lines).encode()
    cut = len(text) - 3 if data is None else data.draw(st.integers(0, len(text)))
    path = tmp_path / "cut.jsonl"
    path.write_bytes(text[:cut])
    quality = ReadQuality()

    requests = list(read_log(path, quality=quality))

    whole = text[:cut].count(b"\n")
    assert len(requests) == quality.num_requests
    assert all(line > whole for _, line in quality.bad_lines)
    assert quality.num_rows >= whole
