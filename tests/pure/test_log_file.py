"""`--log-file`: rotated under a server that writes to it, and full."""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.server.run import log_to_file

NUM_THREADS, NUM_LINES = 4, 200


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which is as before after the test, as is SIGHUP."""
    root, previous = logging.getLogger(), signal.getsignal(signal.SIGHUP)
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    signal.signal(signal.SIGHUP, previous)


def test_no_line_is_lost_by_rotation(tmp_path: Path, root_logger: logging.Logger) -> None:
    """Threads log while the file is renamed again and again, with the signal of rotating programs.

    Each line is whole, and in one of the files; the last are in that of the name.
    """
    path = tmp_path / "ramify.log"
    log_to_file(path, as_json=True, replica="b")
    log = logging.getLogger("ramify.requests")

    def write(thread: int) -> None:
        for number in range(NUM_LINES):
            log.info("request", extra={"fields": {"thread": thread, "number": number}})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    num_renamed = 0
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            path.rename(tmp_path / f"ramify.log.{num_renamed}")
            os.kill(os.getpid(), signal.SIGHUP)
            num_renamed += 1
    log.info("end", extra={"fields": {"thread": -1, "number": 0}})

    lines = [
        json.loads(line)
        for file in tmp_path.iterdir()
        for line in file.read_text("utf-8").splitlines()
    ]
    assert num_renamed > 0
    assert {line["replica"] for line in lines} == {"b"}
    assert sorted((line["thread"], line["number"]) for line in lines) == [
        (-1, 0),
        *((thread, number) for thread in range(NUM_THREADS) for number in range(NUM_LINES)),
    ]
    assert json.loads(path.read_text("utf-8").splitlines()[-1])["message"] == "end"


def test_a_full_disk_is_said_on_stderr(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, though the report could come back as a line of the log."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    log_to_file(Path("/dev/full"), as_json=False)

    root_logger.warning("first")
    root_logger.warning("second")

    assert capsys.readouterr().err.count("/dev/full: lines are lost: ") == 1


def test_a_record_that_cannot_be_formatted_stops_nothing(
    tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with any handler: a line on stderr, and the next record is written."""
    path = tmp_path / "ramify.log"
    log_to_file(path, as_json=False)

    root_logger.warning("%d requests", "two")
    root_logger.warning("next")

    assert "--- Logging error ---" in capsys.readouterr().err
    assert path.read_text("utf-8").endswith("WARNING root: next\n")
