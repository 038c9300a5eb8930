"""A server whose disk never answers a read: requests are answered, and it still ends."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.e2e.conftest import START_S, is_ready
from tests.e2e.test_tier_restart import BODY

ROOT = Path(__file__).parents[2]
PROMPTS = [f"Question {letter}: " + "the violin is in the attic. " * 12 for letter in "abc"]
# A prompt takes about a second, so that loads pay and are given up soon.
COSTS = {"schema": 1, "model": "a slow one", "step_s": 0.0, "token_s": 0.005, "read_s": 0.0}


class Server:
    """A server over a disk whose reads hang while the file `hangs` exists."""

    def __init__(self, directory: Path, name: str) -> None:
        self.hangs, self._log = directory / f"{name} hangs", directory / f"{name}.log"
        (directory / "costs.json").write_text(json.dumps(COSTS))
        options = {"cache-dir": directory / "pages", "cache-disk": "600MB", "cache-cost": directory / "costs.json"}  # fmt: skip
        command = [sys.executable, "-m", "tests.e2e.hanging_disk", self.hangs, "serve", "ramify-tiny"]  # fmt: skip
        command += ["--port", "0", *(f"--{name}={value}" for name, value in options.items())]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=ROOT
            )
        self.url = self._wait()

    def _wait(self) -> str:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            match = re.search(r"listening on (http://\S+)", self._log.read_text())
            if match and is_ready(match[1]):
                return match[1]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"not ready: {self._log.read_text()}")

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """The body of a response."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", content, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            text: str = response.read().decode()
        return text

    def answer(self, prompt: str) -> tuple[Any, int]:
        """The choice of one answer, and the tokens of its prompt that came from disk."""
        payload = json.loads(self.get("/v1/completions", {**BODY, "prompt": prompt}))
        by_tier = payload["usage"]["ramify_cache"].get("read_by_tier", {})
        return payload["choices"][0], by_tier.get("disk", 0)

    def stuck_reads(self) -> int:
        """Reads that the server has found stuck."""
        rows = self.get("/metrics").splitlines()
        [row] = [row for row in rows if row.startswith("ramify_tier_") and '"stuck_reads"' in row]
        return int(float(row.split()[-1]))

    def stop(self) -> int:
        """End it by SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(60)


def test_a_read_that_never_returns_holds_up_no_answer_and_no_end(tmp_path: Path) -> None:
    """Each request computes, the read is counted as stuck, and SIGTERM ends the process in order."""
    first = Server(tmp_path, "first")
    cold = [first.answer(prompt)[0] for prompt in PROMPTS]
    assert first.stop() == 0
    second = Server(tmp_path, "second")
    try:
        _, num_read = second.answer(PROMPTS[0])
        second.hangs.touch()

        answers = [second.answer(prompt) for prompt in PROMPTS[1:]]
        deadline_s = time.monotonic() + 60
        while not second.stuck_reads() and time.monotonic() < deadline_s:
            second.answer("Hi")
            time.sleep(0.2)

        assert num_read > 0
        assert answers == [(choice, 0) for choice in cold[1:]]
        assert second.stuck_reads() > 0
        assert second.stop() == 0
    finally:
        second.process.kill()
        second.process.wait()
