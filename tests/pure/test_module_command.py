"""Modules of ours in another process: the current directory has a say only where it has one here."""

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.module_command import module_command


@pytest.mark.parametrize("place", ["", ".", None])
def test_a_file_of_the_current_directory_is_run_only_where_this_process_would(
    place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ramify serve` does not have that directory on its path, `python -m` and `python -c` have."""
    (tmp_path / "calendar.py").write_text("print('not of Python')")
    monkeypatch.chdir(tmp_path)
    elsewhere = [path for path in sys.path if path and Path(path).resolve() != tmp_path]
    monkeypatch.setattr(sys, "path", elsewhere if place is None else [place, *elsewhere])

    command = [*module_command("calendar"), "2026"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert ("not of Python" in output) == (place is not None)
    assert ("December" in output) == (place is None)
