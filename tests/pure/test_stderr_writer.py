"""stderr that stalls, is full or is closed stops nobody who writes to it."""

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.server.operations.stderr_writer import (
    MAX_PENDING_BYTES,
    StderrWriter,
    stderr_in_background,
)

LINE = "x" * 1023 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends to read and to write."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(end: int, text: bytes) -> bytes:
    """What a pipe gives until some text has come."""
    data = b""
    while text not in data:
        data += os.read(end, 65536)
    return data


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_pipe_that_nobody_reads_blocks_nobody(pipe: tuple[int, int], is_blocking: bool) -> None:
    """Texts are queued up to a bound, then dropped; the reader is told how many bytes."""
    readable, writable = pipe
    os.set_blocking(writable, is_blocking)
    writer = StderrWriter(writable)
    num_lines = 4 * MAX_PENDING_BYTES // len(LINE)

    start_s = time.monotonic()
    for _ in range(num_lines):
        assert writer.write(LINE) == len(LINE)
    assert time.monotonic() - start_s < 5
    parts: list[bytes] = []
    reader = threading.Thread(target=lambda: parts.append(read_until(readable, b"END")))
    reader.start()
    writer.flush_for(30)
    assert not writer._thread.is_alive()
    os.write(writable, b"END")
    reader.join()

    [received] = parts
    notices = [line for line in received.splitlines() if line.endswith(b"are lost")]
    num_lost = sum(int(notice.split()[-4]) for notice in notices)
    assert num_lost >= num_lines * len(LINE) - MAX_PENDING_BYTES - 65536
    assert received.count(LINE.encode()) * len(LINE) + num_lost == num_lines * len(LINE)


def test_a_full_disk_loses_text_and_nothing_else() -> None:
    """ENOSPC stops neither the writers nor the thread."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = StderrWriter(descriptor)

    for _ in range(100):
        writer.write("lost\n")
    writer.flush_for(5)

    assert not writer._thread.is_alive()
    os.close(descriptor)


def test_a_closed_pipe_loses_text_and_nothing_else() -> None:
    """EPIPE is no error of a writer."""
    readable, writable = os.pipe()
    os.close(readable)
    writer = StderrWriter(writable)

    writer.write("lost\n")
    writer.flush_for(5)

    assert not writer._thread.is_alive()
    os.close(writable)


def test_texts_come_in_order_and_whole(pipe: tuple[int, int]) -> None:
    """Of several threads too; the last ones are written at the end."""
    readable, writable = pipe
    writer = StderrWriter(writable)

    def write(name: str) -> None:
        for number in range(50):
            writer.write(f"{name}{number}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.write("\ud800 end\n")
    writer.flush_for(5)

    lines = read_until(readable, b"end\n").decode().splitlines()
    assert lines[-1] == "\\ud800 end"
    for name in "abc":
        assert [line for line in lines if line[0] == name] == [f"{name}{i}" for i in range(50)]


def test_logs_warnings_and_banners_go_through_it(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the block `sys.stderr` is the writer; behind it, what it was."""
    readable, writable = pipe
    original = os.fdopen(os.dup(writable), "w")
    monkeypatch.setattr(sys, "stderr", original)

    with stderr_in_background():
        assert sys.stderr is not original
        assert sys.stderr.isatty() is False
        assert sys.stderr.fileno() == original.fileno()
        handler = logging.StreamHandler()
        handler.emit(logging.makeLogRecord({"msg": "logged"}))
        sys.stderr.write("printed\n")
        sys.stderr.flush()

    assert sys.stderr is original
    assert read_until(readable, b"printed\n") == b"logged\nprinted\n"
    original.close()


def test_a_stream_without_a_descriptor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a program that captures stderr in memory, or has none."""
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)

        with stderr_in_background():
            assert sys.stderr is stream
