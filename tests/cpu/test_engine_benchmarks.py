"""The engine benchmarks on a model of a few kilobytes: processes, turns, tables, verdicts."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from engines.judge import judge
from perf import SHAPES, Shape, Sides

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A benchmark in a process of its own, from any folder."""
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--threads", "1", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_engines_are_measured_on_the_same_answers(tmp_path: Path) -> None:
    """Ramify and transformers give equal tokens; an engine not installed is reported as absent."""
    out = tmp_path / "out.json"

    process = run(
        "engine.py", "--models", "XS", "--dtypes", "float32", "--workloads", "W2warm,W3",
        "--engines", "ramify,transformers,openvino", "--repetitions", "1",
        "--scratch", str(tmp_path), "--peers", str(tmp_path / "none"), "--json", str(out),
    )  # fmt: skip

    assert process.returncode == 0, process.stderr
    assert "OpenVINO GenAI: absent: openvino is not installed" in process.stdout
    tables = json.loads(out.read_text("utf-8"))["tables"][0]
    assert list(tables["rows"]) == ["W2cold", "W2warm", "W3"]
    assert "| 32/32 |" in process.stdout
    for name, least in (("W2cold", 0.9), ("W2warm", 0.96), ("W3", 0.5)):
        row = tables["rows"][name]
        assert row["best_peer"] == "transformers"
        assert row["cells"]["ramify"]["hit_rate"] >= least
        assert row["cells"]["ramify"]["total_s"][0] > row["roofline_s"]


def test_an_engine_beyond_the_limit_is_ended_and_reported(tmp_path: Path) -> None:
    """An engine slower than --limit is ended and reported, and the benchmark still succeeds."""
    process = run(
        "engine.py", "--models", "XS", "--dtypes", "float32", "--workloads", "W1",
        "--engines", "ramify", "--limit", "0.001", "--scratch", str(tmp_path),
    )  # fmt: skip

    assert process.returncode == 0, process.stderr
    assert process.stdout.count("| over 0 s |") == 1


def test_overhead_is_shares_of_one_whole(tmp_path: Path) -> None:
    """The parts of the wall time add up to it, and the ratio of cache on to off is there."""
    out = tmp_path / "out.json"

    process = run(
        "engine.py", "--overhead", "--models", "XS", "--dtypes", "float32", "--pairs", "2",
        "--scratch", str(tmp_path), "--json", str(out),
    )  # fmt: skip

    assert process.returncode == 0, process.stderr
    table = json.loads(out.read_text("utf-8"))["tables"][0]
    assert 0 < table["shares"]["cache"] < 0.5
    assert abs(sum(table["shares"].values()) - 1) < 0.2  # medians, part by part
    assert table["ratio"][1] <= table["ratio"][0] <= table["ratio"][2]


def test_a_version_that_is_slower_is_found(tmp_path: Path) -> None:
    """`judge` reports this tree as slower than itself if every step takes twice as long."""
    args = Namespace(model="XS", dtype="float32", threads=1, plant=2.0, scratch=tmp_path)
    sides = Sides(args, ROOT / "src")
    shape = Shape(1, 128, 32)
    try:
        now, base = sides.measure([shape], pairs=8)
    finally:
        sides.end()

    verdicts = judge(shape.name, now[shape.name], base[shape.name])

    assert shape in SHAPES
    # Not by the clock: beside other programs those intervals are wide.
    assert "processor_s" in {verdict.figure for verdict in verdicts if verdict.slower}


def test_a_missing_baseline_says_how_to_write_one(tmp_path: Path) -> None:
    """A missing baseline names --save; a baseline of another model stops before any measurement."""
    path = tmp_path / "baseline.json"

    missing = run("perf.py", "--baseline", str(path))
    path.write_text(json.dumps({"commit": "HEAD", "metadata": {"model": "another"}}), "utf-8")
    other = run("perf.py", "--baseline", str(path), "--model", "XS")

    assert missing.returncode == 1
    assert "--save" in missing.stderr
    assert other.returncode == 1
    assert "model: the baseline has 'another', here it is 'XS" in other.stderr
