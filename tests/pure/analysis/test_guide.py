"""docs/tutorials/lost-hits.md is true: its commands run and say what the page shows."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "tutorials" / "lost-hits.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```console\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if not line.startswith("pip install")
]
BUDGET = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)[0]
MAX_PICTURE_BYTES = 200_000


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A line of a shell, with this interpreter's `python` and `ramify` and this source tree."""
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": "100",
    }
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which all commands of the page have run, and what they printed."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "budget.toml").write_text(BUDGET, encoding="utf-8")
    printed = ""
    for command in COMMANDS:
        done = run(command, folder)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        printed += done.stdout
    return folder, printed


def test_every_command_writes_its_files(walked: tuple[Path, str]) -> None:
    """Each file that an option of the page names is there, and JSON is JSON."""
    folder, _ = walked
    named = re.findall(r"--(?:html|json) (\S+\.\w+)", "\n".join(COMMANDS))

    assert len(named) >= 5
    for name in named:
        text = (folder / name).read_text(encoding="utf-8")
        if name.endswith(".json"):
            json.loads(text)
        else:
            assert text.startswith("<!doctype html>")


def test_the_findings_of_the_page_are_printed(walked: tuple[Path, str]) -> None:
    """The planted causes are found, in the order of the page, and are gone when mended."""
    _, printed = walked
    shown = re.findall(r"^\d\. (.*)$|^(gone: .*)$", TEXT, re.MULTILINE)
    lines = [finding or gone for finding, gone in shown]

    assert lines[:2] == ["clock in messages[0] (proved)", "tool_order in tools[*] (proved)"]
    assert "gone: clock in messages[0]" in lines
    for line in lines:
        assert line in printed


def test_the_page_shows_the_summary_as_it_is_printed(walked: tuple[Path, str]) -> None:
    """Word for word from the headline to the last line; lines may be cut elsewhere."""
    _, printed = walked
    summary = next(
        block for block in re.findall(r"^```\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    )

    assert " ".join(summary.split()) in " ".join(printed.split())


def test_an_evicted_entry_claims_no_saving(walked: tuple[Path, str]) -> None:
    """No replay has a larger cache, so there is no range of zeros, and no price without prices."""
    folder, _ = walked

    done = run("ramify analyze agents.jsonl.gz --provider vllm --capacity 5k", folder)

    assert "0 tokens lost; no replay shows what mending saves" in done.stdout
    assert "$" not in done.stdout


def test_mending_brings_what_the_replay_predicts(walked: tuple[Path, str]) -> None:
    """The reported hit rate rises by the predicted saving, to two points."""
    folder, _ = walked
    run("ramify analyze mended.jsonl.gz --json mended.json", folder)
    before, after = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("report.json", "mended.json")
    )
    saving = before["saving_all"]["tokens"] / before["num_counted"]

    rise = after["rates"]["reported"]["share"] - before["rates"]["reported"]["share"]

    assert rise > 0.3
    assert abs(rise - saving) < 0.02


def test_the_unmended_log_is_over_the_budget(walked: tuple[Path, str]) -> None:
    """The exit code is 1, and the reason is said."""
    folder, _ = walked

    done = run("ramify analyze agents.jsonl.gz --budget budget.toml", folder)

    assert done.returncode == 1
    assert "over budget" in done.stderr


def test_the_example_is_what_its_generator_writes(walked: tuple[Path, str]) -> None:
    """The file in examples/ holds the rows that the generator writes."""
    folder, _ = walked

    written = gzip.decompress((folder / "agents.jsonl.gz").read_bytes())

    assert written == gzip.decompress((ROOT / "examples" / "agents.jsonl.gz").read_bytes())


def test_a_private_report_has_no_words_of_the_log(walked: tuple[Path, str]) -> None:
    """Neither quotes nor names of conversations and files are in it."""
    folder, _ = walked

    text = (folder / "private.html").read_text(encoding="utf-8")

    for words in (
        "You answer customers",
        "You review changes",
        "agents.jsonl",
        "review-",
        "2026-11-02",
    ):
        assert words not in text


def test_links_and_pictures_exist() -> None:
    """Every relative link leads to a file; pictures are small."""
    links = re.findall(r"\]\(([^)#\s]+)\)", TEXT)
    files = [PAGE.parent / link for link in links if "://" not in link]

    assert not [file for file in files if not file.exists()]
    pictures = [file for file in files if file.suffix == ".png"]
    assert len(pictures) == 3
    assert all(file.stat().st_size < MAX_PICTURE_BYTES for file in pictures)
