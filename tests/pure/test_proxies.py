"""The server behind nginx and Caddy, with the configurations of deploy/: streams, bodies, ends."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from ramify.server.http.wire import MAX_BODY_BYTES
from ramify.server.tenants import ApiKeys
from tests.pure.live_server import LIMIT_S, Live, events, live, until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KEY = {"Authorization": "Bearer key"}
NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ worker_connections 64; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    {site}
}}
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def nginx_command(folder: Path, port: int, backend: str) -> list[str]:
    """nginx with deploy/nginx.conf, without its certificate."""
    site = (DEPLOY / "nginx.conf").read_text("utf-8")
    site = re.sub(r"^ *(ssl_certificate|server_name).*\n", "", site, flags=re.MULTILINE)
    site = site.replace("127.0.0.1:8000", backend).replace("443 ssl", f"127.0.0.1:{port}")
    file = folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, site=site), "utf-8")
    return ["nginx", "-p", str(folder), "-c", str(file)]


def caddy_command(folder: Path, port: int, backend: str) -> list[str]:
    """Caddy with deploy/Caddyfile, without a name and so without a certificate."""
    site = (DEPLOY / "Caddyfile").read_text("utf-8")
    site = site.replace("127.0.0.1:8000", backend)
    site = site.replace("llm.example.com", f"http://127.0.0.1:{port}")
    file = folder / "Caddyfile"
    file.write_text("{\n\tadmin off\n}\n" + site, "utf-8")
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]


COMMANDS = {"nginx": nginx_command, "caddy": caddy_command}


@pytest.fixture(params=COMMANDS)
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Live, str]]:
    """A server with a key, and the address of a proxy in front of it."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    with (
        live(ApiKeys.of("key", admin="admin")) as server,
        started(request.param, tmp_path, server) as url,
    ):
        yield server, url


@contextmanager
def started(name: str, folder: Path, server: Live) -> Iterator[str]:
    port = free_port()
    command = COMMANDS[name](folder, port, server.url.removeprefix("http://"))
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/bin:/usr/local/bin", "HOME": str(folder)},
    ) as process:  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + LIMIT_S
            while True:
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                try:
                    httpx.get(url + "/livez", timeout=LIMIT_S)
                    break
                except httpx.TransportError:
                    time.sleep(0.02)
            yield url
        finally:
            process.kill()


def completion(**fields: object) -> dict[str, object]:
    return {"prompt": "Who lives in Rome?", "max_tokens": 4, **fields}


def test_a_stream_comes_token_by_token(proxy: tuple[Live, str]) -> None:
    """The first token is there while the engine waits before the second step."""
    server, url = proxy
    server.gate.is_open = False
    server.gate.allowed.release()
    body = completion(stream=True, ignore_eos=True)
    with httpx.stream(
        "POST", url + "/v1/completions", json=body, headers=KEY, timeout=LIMIT_S
    ) as response:
        stream = events(response)
        assert next(stream)["choices"]
        server.gate.open()
        assert [event["choices"][0]["finish_reason"] for event in stream][-1] == "length"


def test_a_client_that_leaves_ends_its_request(proxy: tuple[Live, str]) -> None:
    """A closed connection in front of the proxy aborts the request behind it."""
    server, url = proxy
    server.gate.is_open = False
    server.gate.allowed.release()
    body = completion(stream=True, ignore_eos=True, max_tokens=500)
    with httpx.stream(
        "POST", url + "/v1/completions", json=body, headers=KEY, timeout=LIMIT_S
    ) as response:
        next(events(response))
    ended = re.compile(r'^ramify_http_responses_total{.*status="499".*} 1', re.MULTILINE)
    admin = {"Authorization": "Bearer admin"}
    until(lambda: ended.search(server.get("/metrics", headers=admin).text) is not None)
    server.gate.open()
    server.until_idle()
    assert server.look(lambda core: core.stats().num_steps) < 10  # of 500


def test_bodies_up_to_the_limit_reach_the_server(proxy: tuple[Live, str]) -> None:
    """20 MB are read by the server; what is beyond its limit gets the server's own error."""
    server, url = proxy
    body = completion(prompt="x" * (20 << 20))
    long = httpx.post(url + "/v1/completions", json=body, headers=KEY, timeout=LIMIT_S)
    content = b" " * (MAX_BODY_BYTES + 1)
    over = httpx.post(
        url + "/v1/completions", content=content, headers=KEY | {"Content-Type": "application/json"},
        timeout=LIMIT_S,
    )  # fmt: skip

    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert over.status_code == 413
    assert "33554432" in over.json()["error"]["message"].replace(",", "")
    server.until_idle()


def test_errors_pass_unchanged(proxy: tuple[Live, str]) -> None:
    """401 and 400 have the server's bodies."""
    server, url = proxy

    assert (
        httpx.post(url + "/v1/completions", json=completion(), timeout=LIMIT_S).status_code == 401
    )
    bad = httpx.post(
        url + "/v1/completions", json=completion(temperature="hot"), headers=KEY, timeout=LIMIT_S
    )
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "temperature"
    assert server.is_idle()
