"""The file of `--record`: rotated, removed, full, or a pipe that nobody reads."""

import os
from pathlib import Path

import pytest

from ramify.errors import ConfigError
from ramify.server.operations.request_log import LineFile


def test_a_record_that_was_rotated_goes_on_under_its_name(tmp_path: Path) -> None:
    """After a rename, a removal, and copytruncate: each line is in the file that has the name."""
    path = tmp_path / "record.jsonl"
    file = LineFile(path)
    file.write("first\n")

    path.rename(tmp_path / "record.1")
    file.write("renamed\n")
    assert (tmp_path / "record.1").read_text() == "first\n"
    assert path.read_text() == "renamed\n"

    path.unlink()
    file.write("removed\n")
    file.write("again\n")
    assert path.read_text() == "removed\nagain\n"

    os.truncate(path, 0)
    file.write("truncated\n")
    assert path.read_text() == "truncated\n"


def test_a_record_that_was_replaced_goes_on_in_the_new_file(tmp_path: Path) -> None:
    """As by a program that makes the new file itself."""
    path, new = tmp_path / "record.jsonl", tmp_path / "new"
    file = LineFile(path)
    new.write_text("head\n")

    new.replace(path)
    file.write("line\n")

    assert path.read_text() == "head\nline\n"


def test_a_record_whose_directory_is_gone_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A renamed one takes the lines until it can be made anew; a removed one loses them."""
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    file = LineFile(folder / "record.jsonl")

    folder.rename(moved)
    file.write("moved\n")
    assert (moved / "record.jsonl").read_text() == "moved\n"
    assert not caplog.records

    (moved / "record.jsonl").unlink()
    file.write("lost\n")
    file.write("lost\n")
    assert [record.levelname for record in caplog.records] == ["ERROR"]

    folder.mkdir()
    file.write("back\n")
    assert (folder / "record.jsonl").read_text() == "back\n"


def test_a_record_into_a_pipe_that_nobody_reads_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What does not fit is lost, which is logged once."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = LineFile(path)

    for _ in range(200):
        file.write("x" * 1023 + "\n")

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    os.close(reader)


def test_a_full_disk_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Lines are dropped, which is logged once; a file that cannot be opened is a ConfigError."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    file = LineFile(Path("/dev/full"))

    file.write("one\n")
    file.write("two\n")

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with pytest.raises(ConfigError, match="cannot be written"):
        LineFile(Path("/nowhere/record"))
