"""Hub models are downloaded once, without pickles; a server on loopback stands for the hub."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from ramify.models.loader import load_model, read_config
from ramify.testing import write_tiny_checkpoint


class Hub(BaseHTTPRequestHandler):
    """The parts of a hub's API that a download asks for; a model with one commit."""

    files: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[list[str]] = []
    commit = "1" * 40

    def answer(self) -> None:
        self.requests.append(self.path)
        name = self.path.rpartition("/")[2].partition("?")[0]
        if self.path.startswith("/api/models/some/model/tree"):
            tree = [
                {"type": "file", "path": file, "size": len(body), "oid": file}
                for file, body in self.files.items()
            ]
            self.send(json.dumps(tree).encode())
        elif self.path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": file} for file in self.files]
            info = {"id": "some/model", "modelId": "some/model", "sha": self.commit}
            self.send(json.dumps(info | {"siblings": siblings, "tags": []}).encode())
        elif self.path.startswith("/some/model/resolve/") and name in self.files:
            self.send(self.files[name])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_GET = do_HEAD = answer  # noqa: N815 - names of http.server

    def send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        pass


def download(
    name: str, cache: Path, port: int, find: str = "find_checkpoint", **options: Any
) -> subprocess.CompletedProcess[str]:
    code = (
        f"from ramify.models.checkpoint.find import {find}\nprint({find}({name!r}, **{options!r}))"
    )
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env |= {"HF_HUB_CACHE": str(cache), "HF_ENDPOINT": f"http://127.0.0.1:{port}"}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_hub_model_is_downloaded_once(tmp_path: Path) -> None:
    """Weights, configuration and tokenizer, no pickles; then from the cache; offline forbids it.

    A snapshot without all its weights is completed, if offline does not forbid that.
    """
    source = write_tiny_checkpoint(tmp_path / "source", "llama")
    Hub.files = {file.name: file.read_bytes() for file in source.iterdir()} | {"evil.bin": b"x"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port, cache = server.server_address[1], tmp_path / "cache"
        refused = download("some/model", cache, port, offline=True)
        first = download("some/model", cache, port)
        num_requests = len(Hub.requests)
        second = download("some/model", cache, port)
        num_later = len(Hub.requests)
        missing = download("some/other", cache, port)
        (Path(first.stdout.strip()) / "model.safetensors").unlink()
        # As other programs leave it, which ask for some files only.
        for listing in cache.rglob("trees/*"):
            listing.unlink()
        partial = download("some/model", cache, port, offline=True)
        completed = download("some/model", cache, port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    assert "offline is set" in refused.stderr
    assert first.returncode == 0, first.stderr
    path = Path(first.stdout.strip())
    assert partial.stdout == completed.stdout == first.stdout
    assert load_model(path).config.num_layers == read_config(source).num_layers
    assert not (path / "evil.bin").exists()
    assert second.stdout == first.stdout
    assert not any("some/model" in request for request in Hub.requests[num_requests:num_later])
    assert "CheckpointError: there is no directory 'some/other'" in missing.stderr


def test_a_tokenizer_comes_without_its_weights(tmp_path: Path) -> None:
    """A server of replicas elsewhere downloads texts only, once; an engine gets the weights later."""
    source = write_tiny_checkpoint(tmp_path / "source", "llama")
    Hub.files = {file.name: file.read_bytes() for file in source.iterdir()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        port, cache = server.server_address[1], tmp_path / "cache"
        first = download("some/model", cache, port, find="find_text_files")
        has_weights = (Path(first.stdout.strip()) / "model.safetensors").exists()
        num_requests = len(Hub.requests)
        second = download("some/model", cache, port, find="find_text_files")
        num_later = len(Hub.requests)
        whole = download("some/model", cache, port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

    path = Path(first.stdout.strip())
    assert first.returncode == 0, first.stderr
    assert second.stdout == whole.stdout == first.stdout
    assert (path / "tokenizer.json").exists()
    assert not has_weights
    assert not any("some/model" in request for request in Hub.requests[num_requests:num_later])
    assert (path / "model.safetensors").exists()


def test_without_a_network_the_error_says_so(tmp_path: Path) -> None:
    """A refused connection is one line, soon."""
    run = download("some/model", tmp_path, 9)

    assert "cannot be downloaded" in run.stderr.splitlines()[-1]


def test_cached_pickles_are_the_reason_where_nothing_can_be_downloaded(tmp_path: Path) -> None:
    """Offline and without a network, and soon."""
    source = write_tiny_checkpoint(tmp_path / "source", "llama")
    cache = tmp_path / "cache"
    snapshot = cache / "models--some--other" / "snapshots" / Hub.commit
    snapshot.mkdir(parents=True)
    (cache / "models--some--other" / "refs").mkdir()
    (cache / "models--some--other" / "refs" / "main").write_text(Hub.commit)
    (snapshot / "config.json").write_bytes((source / "config.json").read_bytes())
    (snapshot / "pytorch_model.bin").write_bytes(b"x")
    # A network that swallows everything: connections are accepted and never answered.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin_s = time.monotonic()
        port = silent.getsockname()[1]
        runs = [download("some/other", cache, port, offline=offline) for offline in (True, False)]
        duration_s = time.monotonic() - begin_s

    assert duration_s < 30
    for run in runs:
        assert f"{snapshot} has pickled weights only (pytorch_model.bin)" in run.stderr
        assert "`hf download some/other`" in run.stderr
