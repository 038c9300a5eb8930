"""The generator of planted logs: its truth can be trusted."""

import json
from pathlib import Path

import pytest

from tests.pure.analysis.planted_formats import FORMATS, planted_log, write_log
from tests.pure.analysis.planted_logs import KINDS, LEGITIMATE, UNSEEN
from tests.pure.analysis.planted_slots import same
from tests.pure.analysis.planted_truth import shared_chars

APIS = ("openai_chat", "openai_responses", "anthropic", "otlp")


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_a_seed_gives_one_log(format_name: str, tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed others."""
    names = ["a", "b", "c"]
    for name, seed in zip(names, (1, 1, 2), strict=True):
        write_log(planted_log(seed, format_name, num_requests=40), format_name, tmp_path / name)

    a, b, c = ((tmp_path / name).read_bytes() for name in names)
    assert a == b != c


@pytest.mark.parametrize("format_name", APIS)
def test_every_cause_is_planted(format_name: str) -> None:
    """A log of moderate size has every cause that text in its API can prove, and decoys."""
    log = planted_log(1, format_name, num_requests=900)
    causes: set[str] = set()
    num_clean = 0
    for request in log.requests:
        truth = log.truth(request.number, log.candidates(request.number)[1])
        causes |= truth.causes.keys()
        num_clean += truth.divergence is not None and not truth.causes

    assert causes == KINDS.keys() - UNSEEN[FORMATS[format_name].api]
    assert num_clean > 50


@pytest.mark.parametrize("format_name", APIS)
def test_mending_all_causes_leaves_none(format_name: str) -> None:
    """A request with a cause has a divergence or another scope, and mended it shares more."""
    log = planted_log(3, format_name, num_requests=200)

    for request in log.requests:
        _, match = log.candidates(request.number)
        if match is None:
            continue
        truth = log.truth(request.number, match)
        waste = truth.causes.keys() - LEGITIMATE
        if waste:
            assert truth.divergence is not None or waste & {
                "cache_key_scattered",
                "namespace_split",
            }
            assert truth.raw_chars < truth.shared_chars


def test_a_compaction_is_a_summary_that_the_match_has_not() -> None:
    """Later turns with the same summary, and conversations without one, have no compaction."""
    log = planted_log(41, "openai_chat", alone="compaction", num_requests=200)
    num_new = num_same = num_missed = 0
    for request in log.requests:
        _, match = log.candidates(request.number)
        if match is None:
            continue
        texts = [
            {piece.content for piece in log.requests[number].render(request.changes)[1]}
            for number in (request.number, match)
        ]
        has, had = (
            {text for text in side if text.startswith("This session is being")} for side in texts
        )
        is_compaction = "compaction" in log.truth(request.number, match).causes
        assert not is_compaction or has - had
        num_missed += bool(has - had) and not is_compaction
        num_new += is_compaction
        num_same += bool(has & had)

    assert num_new > 10
    assert num_missed < num_new / 4  # what differs earlier stands before the summary
    assert num_same > 10


def test_clean_turns_are_prefixes_of_the_next() -> None:
    """Without plants a conversation's prompt is the start of its next prompt."""
    log = planted_log(4, "openai_chat", num_requests=300)
    last: dict[tuple[int, int], int] = {}
    num_checked = 0
    for request in log.requests:
        before = last.get((request.cell, request.conversation))
        changes = [change for _, change in request.changes.values()]
        if before is not None and all(change.mended is same for change in changes):
            mine, other = request.render(())[1], log.requests[before].render(())[1]
            is_edit = len(mine) == len(other)  # a decoy: the last message edited or sent again
            assert is_edit or shared_chars(mine, other) >= sum(
                len(piece.content) for piece in other
            )
            num_checked += not is_edit
        last[request.cell, request.conversation] = request.number

    assert num_checked > 100


def test_lines_of_requests_are_told(tmp_path: Path) -> None:
    """A line told for a request holds the request, bad lines hold no JSON."""
    log = planted_log(5, "litellm", num_requests=60)
    written = write_log(log, "litellm", tmp_path / "log.jsonl")
    rows = written.path.read_text(encoding="utf-8").splitlines()

    for request, line in zip(log.requests, written.lines, strict=True):
        assert json.loads(rows[line - 1])["startTime"] == request.start_s
    for line in written.bad_lines:
        with pytest.raises(json.JSONDecodeError):
            json.loads(rows[line - 1])
