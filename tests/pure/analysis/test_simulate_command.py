"""`ramify simulate`: its JSON, its table, and what it answers to bad input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ramify.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests of which the second repeats the first, a minute later."""
    rows = [
        {
            "timestamp": 60_000 * at,
            "input_length": 1100,
            "output_length": 9,
            "hash_ids": [0, 1, 2 + at],
        }
        for at in range(2)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_json_has_the_documented_keys(trace: Path, tmp_path: Path) -> None:
    """Rates are by policy and capacity in tokens, bounds beside them, lifetimes in seconds."""
    out = tmp_path / "out.json"

    done = run(
        trace, "--capacity", "1k,1M", "--policy", "lru,auto", "--ttl", "30,1m", "--json", out
    )

    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text(encoding="utf-8"))
    rate = 1024 / 2200
    rates = {"1000": pytest.approx(512 / 2200), "1000000": pytest.approx(rate)}
    assert report["schema"] == 1
    assert report["curve"] == {"lru": rates, "auto": rates}
    assert report["one_pass_lru"] == rates
    assert report["belady"] == rates
    assert report["infinite"] == pytest.approx(rate)
    assert report["ttl"] == {"30": 0, "60": pytest.approx(rate)}
    assert "46.55%" in done.output


def test_json_on_standard_output_is_alone(trace: Path) -> None:
    """With `--json -` nothing else is written to standard output."""
    done = run(trace, "--json", "-")

    assert json.loads(done.stdout)["trace"]["num_requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "best"), "the policies are auto, cost"),
        (("--capacity", "100"), "less than a page of 512"),
        (("--capacity", "lots"), "1000000, 1M, 500k"),
        (("--capacity", "24GB"), "--model"),
        (("--page-size", "100"), "multiple of 512"),
        (("--ttl", "soon"), "300, 5m or 1h"),
        (("--json", "/nowhere/out.json"), "cannot be written"),
    ],
)
def test_bad_options_are_a_line_and_exit_code_2(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A bad option gets one line with the way out, and no traceback."""
    done = run(trace, *arguments)

    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_texts_before_hashes_need_a_page_size(tmp_path: Path) -> None:
    """Pages of 16 tokens do not hold blocks of 512: one line says which size serves both."""
    path = tmp_path / "mixed.jsonl"
    chat = {"model": "m", "messages": [{"role": "user", "content": "Tides. " * 900}]}
    hashed = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
    rows = [chat, chat, hashed, hashed]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    refused = run(path)
    done = run(path, "--page-size", "512", "--capacity", "1M", "--json", "-")

    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--page-size 512" in refused.stderr
    trace = json.loads(done.stdout)
    assert trace["trace"]["num_requests"] == 4
    assert trace["infinite"] > 0.4


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    done = run(tmp_path / "none.jsonl")

    assert done.exit_code == 2
    assert "none.jsonl" in done.stderr


def test_no_torch_is_loaded() -> None:
    """The calls of the analyser need no torch."""
    code = (
        "import sys; from ramify.analysis import simulate; import ramify.cli.simulate\n"
        "print(*{'torch', 'transformers', 'tokenizers'} & set(sys.modules))"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert loaded.stdout.split() == []
