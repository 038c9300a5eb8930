"""llama.cpp's server: one slot per request, unified K/V, its own prompt cache; token ids."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines.contract import AbsentError, Answer, Prompts, Resources, Setup
from engines.llama_file import quantized_path, token_weight_bytes, write_gguf
from engines.process import peak_memory

KV_BYTES = 4 << 30  # no prefix is shared between slots; more requests than fit wait for a slot
START_S = 120.0


class LlamaServer:
    """A server process on a loopback port, restarted when a workload wants other slots."""

    def __init__(self, setup: Setup) -> None:
        self._binary = Path(sys.executable).parent / "llama-server"
        if not self._binary.exists():
            raise AbsentError(f"{self._binary} was not built")
        self._setup = setup
        file_type = setup.options.get("file_type")
        self._file = quantized_path(setup, file_type) if file_type else write_gguf(setup)
        if not self._file.is_file():
            raise AbsentError(f"{self._file.name} is missing")
        # Of quantised weights it keeps K/V in float16 unless it is told otherwise.
        self._kv_type = "f16" if file_type else {"float32": "f32", "bfloat16": "bf16"}[setup.dtype]
        # The server itself reports its version only as "unknown".
        path = self._binary.parents[1] / "version"
        self.version = path.read_text("utf-8").strip() if path.exists() else "of unknown version"
        self.note = ""
        self._slots = (0, 0)
        self._port = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._load_s = 0.0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process

    def prepare(self, num_requests: int, request_tokens: int) -> None:
        """Start a server with a slot per request, or as many as memory allows."""
        most = max(1, KV_BYTES // (self._setup.token_bytes * (request_tokens + 8)))
        slots = min(num_requests, most)
        context = slots * (request_tokens + 8)
        if (slots, context) != self._slots:
            self.close()
            self._slots = (slots, context)
            self._begin(slots, context)

    def _begin(self, slots: int, context: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        threads = str(self._setup.threads)
        start = time.monotonic()
        self._server = subprocess.Popen(
            [
                self._binary, "-m", self._file, "--host", "127.0.0.1", "--port", str(self._port),
                "-np", str(slots), "-c", str(context), "--kv-unified", "-t", threads, "-tb",
                threads, "-b", "2048", "-ub", "512", "-ctk", self._kv_type, "-ctv", self._kv_type,
                "--cache-ram", "4096", "--cache-prompt", "-lv", "1",
            ],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        while time.monotonic() < start + START_S:
            if self._server.poll() is not None:
                break
            try:
                if self._request("GET", "/health", None).status == 200:
                    self._load_s = time.monotonic() - start
                    return
            except OSError:
                pass
            time.sleep(0.02)
        self._log.seek(0)
        raise AbsentError(
            f"the server did not start (status {self._server.poll()}; -4: it was compiled for another "
            f"processor): {self._log.read()[-300:].decode()!r}"
        )

    def _request(self, method: str, path: str, body: str | None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse()

    def generate(self, prompts: Prompts, num_new: int) -> Answer:
        tokens: list[list[int]] = [[] for _ in prompts]
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        start = time.perf_counter()

        def ask(place: int) -> None:
            body: dict[str, Any] = {
                "prompt": prompts[place], "n_predict": num_new, "temperature": 0, "top_k": 1,
                "samplers": ["top_k"], "stream": True, "ignore_eos": True, "return_tokens": True,
                "cache_prompt": True,
            }  # fmt: skip
            answer = self._request("POST", "/completion", json.dumps(body))
            if answer.status != 200:
                raise RuntimeError(answer.read()[:300].decode())
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(str(event["error"])[:300])
                    new = event.get("tokens") or []
                    if new and not event.get("stop"):
                        last[place] = time.perf_counter() - start
                        first[place] = first[place] or last[place]
                        tokens[place] += new

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(ask, range(len(prompts))))
        return Answer(tokens, first, last)

    def resources(self) -> Resources:
        if self._server is None:
            self.prepare(1, self._setup.max_len)
        assert self._server is not None
        return Resources(
            self._load_s, peak_memory(str(self._server.pid)), token_weight_bytes(self._file)
        )

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()


load = LlamaServer
