"""The exported trace has the sharing of the log, and nothing else of it."""

import io
import json
from pathlib import Path

import pytest

from ramify.analysis.corpus import Corpus
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind
from ramify.analysis.report.analyze import read_corpus
from ramify.analysis.report.writers.trace_export import BLOCK_SIZE, write_trace
from ramify.analysis.simulation.calls import simulate
from tests.pure.analysis.planted_formats import planted_log, write_log
from tests.pure.analysis.simulated_traces import MOONCAKE

TRACE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def exported(corpus: Corpus, path: Path) -> Path:
    out = io.StringIO()
    write_trace(corpus, out)
    path.write_text(out.getvalue())
    return path


def infinite(log: object) -> float:
    return simulate(
        log,  # type: ignore[arg-type]
        capacity="10M",
        policy=(),
        page_size=BLOCK_SIZE,
    ).infinite


@pytest.mark.parametrize("form", ["langfuse", "helicone", "har_responses", "otlp"])
def test_the_trace_has_the_hit_rate_of_the_log(tmp_path: Path, form: str) -> None:
    """Read again as a Mooncake trace, the infinite hit rate is the same."""
    log = tmp_path / "log.jsonl"
    write_log(planted_log(3, form, num_requests=150), form, log)
    corpus = read_corpus([log], ReadQuality())

    trace = exported(corpus, tmp_path / "trace.jsonl")

    assert infinite(trace) == pytest.approx(infinite(corpus), abs=1e-12) and infinite(trace) > 0.1


def test_the_trace_has_no_text(tmp_path: Path) -> None:
    """Rows have lengths, times from 0 and numbered ids, first seen first."""
    log = tmp_path / "log.jsonl"
    write_log(planted_log(3, "langfuse", num_requests=60), "langfuse", log)

    trace = exported(read_corpus([log], ReadQuality()), tmp_path / "trace.jsonl")

    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    ids = [block for row in rows for block in row["hash_ids"]]
    assert all(set(row) == TRACE_KEYS for row in rows)
    assert rows[0]["timestamp"] == 0
    assert all(isinstance(value, int | list) for row in rows for value in row.values())
    assert list(dict.fromkeys(ids)) == list(range(len(set(ids))))
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // BLOCK_SIZE) for row in rows)


def test_scopes_share_no_block(tmp_path: Path) -> None:
    """Equal prompts of two tenants have different ids."""
    corpus = Corpus()
    for scope in ("a", "b", "a"):
        segment = Segment("messages[0]", SegmentKind.MESSAGE, "word " * 2000)
        corpus.add(LoggedRequest("log", 1, segments=(segment,), cache_scope=scope))

    trace = exported(corpus, tmp_path / "trace.jsonl")

    first, second, third = (json.loads(line)["hash_ids"] for line in trace.read_text().splitlines())
    assert first == third and not set(first) & set(second)


def test_a_hashed_trace_keeps_its_block_size(tmp_path: Path) -> None:
    """Blocks of 16 tokens are exported as such and read again."""
    corpus = Corpus()
    for blocks in ((7, 8, 9), (7, 8, 4)):
        corpus.add(LoggedRequest("log", 1, hashed=HashedPrompt(16, blocks, 40)))

    trace = exported(corpus, tmp_path / "trace.jsonl")

    assert json.loads(trace.read_text().splitlines()[1])["hash_ids"] == [0, 1, 3]
    result = simulate(trace, capacity="1k", policy=())
    assert result.facts.page_size == 16 and result.infinite == pytest.approx(32 / 80)


@pytest.mark.skipif(not MOONCAKE.exists(), reason="needs the published Mooncake trace")
def test_the_published_trace_keeps_its_hit_rate(tmp_path: Path) -> None:
    """37.34 % before and after."""
    corpus = read_corpus([MOONCAKE], ReadQuality())

    trace = exported(corpus, tmp_path / "trace.jsonl")

    assert infinite(trace) == pytest.approx(0.3734, abs=0.0001) == infinite(MOONCAKE)
