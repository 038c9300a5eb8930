"""A server whose disk never answers a read: requests are answered, and it still ends."""

import os
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Running, start_server
from tests.e2e.test_tier_restart import answer

PROMPTS = [f"Question {letter}: " + "the violin is in the attic. " * 12 for letter in "abc"]


def stuck_reads(server: Running) -> int:
    """Reads that the server has found stuck."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        rows = response.read().decode().splitlines()
    [row] = [row for row in rows if 'event="stuck_reads"' in row and row.startswith("ramify_tier")]
    return int(float(row.split()[-1]))


def replace_by_pipe(path: Path) -> None:
    """Put a pipe in place of a file: to open it for reading waits for a writer, who never comes."""
    path.unlink()
    os.mkfifo(path)


def test_a_read_that_never_returns_holds_up_no_answer_and_no_end(tmp_path: Path) -> None:
    """Each request computes, the read is counted as stuck, and SIGTERM ends the process in order."""
    options = ("--cache-dir", str(tmp_path / "pages"), "--cache-disk", "600MB")
    first = start_server(tmp_path / "first", *options)
    cold = [answer(first, prompt)[0] for prompt in PROMPTS]
    assert first.stop() == 0
    second = start_server(tmp_path / "second", *options)
    try:
        for path in (tmp_path / "pages").glob("*/*.seg"):
            replace_by_pipe(path)

        answers = [answer(second, prompt) for prompt in PROMPTS]
        deadline_s = time.monotonic() + 60
        while not stuck_reads(second) and time.monotonic() < deadline_s:
            answer(second, "Hi")
            time.sleep(0.2)

        assert [choice for choice, _ in answers] == cold
        assert all(read_from_disk(usage) == 0 for _, usage in answers)
        assert stuck_reads(second) > 0
        assert second.stop() == 0
    finally:
        second.process.kill()


def read_from_disk(usage: dict[str, Any]) -> int:
    tokens: int = usage.get("read_by_tier", {}).get("disk", 0)
    return tokens
