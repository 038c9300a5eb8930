"""`ramify deploy` over a Ray that starts nothing: what it asks for, in which order, and how it ends."""

import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytest.importorskip("starlette")

from ramify.deploy.config import config_of
from ramify.deploy.end_signals import EndSignals
from tests.pure.fake_ray import Deployment, FakeRay, RayError
from tests.pure.test_deploy_ingress import free_port

NAME = "ramify.deploy.ray_serve"


@pytest.fixture
def ray() -> FakeRay:
    return FakeRay()


@pytest.fixture
def ray_serve(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module over a fake Ray; whatever it has set is as before at the end."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    for name, module in ray.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield importlib.import_module(NAME)
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.modules.pop(NAME, None)


def here(**fields: Any) -> Any:
    """A deployment for which Ray is started."""
    return config_of({"ingress": {"port": free_port()}, "drain_s": 5, **fields})


def takes_signals() -> bool:
    return getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is EndSignals._handle


class Sender:
    """Sends SIGTERM to this process each time that a condition holds, in another thread."""

    def __init__(self, *conditions: Callable[[], bool]) -> None:
        self._conditions = conditions
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _send(self) -> None:
        for condition in self._conditions:
            deadline = time.monotonic() + 20
            while not (condition() and takes_signals()):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_lets_requests_end(ray_serve: Any, ray: FakeRay) -> None:
    """The deployment is deleted and waited for, then Serve and Ray end; signals are as before."""
    before = signal.getsignal(signal.SIGTERM)

    with Sender(takes_signals):
        code = ray_serve.run(here())

    assert code == 0
    assert ray.calls == [
        "ray.init", "serve.start", "serve.run", "serve.delete", "serve.shutdown", "ray.shutdown",
    ]  # fmt: skip
    assert not ray.applications
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_at_once(ray_serve: Any, ray: FakeRay) -> None:
    """Nothing is waited for: Ray ends, and every process with it."""
    ray.num_looks = 1 << 30

    with Sender(takes_signals, lambda: "serve.delete" in ray.calls):
        code = ray_serve.run(here())

    assert code == 130
    assert ray.calls[-2:] == ["serve.delete", "ray.shutdown"]


def test_on_a_cluster_the_deployment_stays(ray_serve: Any, ray: FakeRay) -> None:
    """The command returns when all is ready, and ends nothing but its connection."""
    assert ray_serve.run(here(address="10.0.0.1:6379")) == 0

    assert ray.calls == ["ray.init", "serve.start", "serve.run", "ray.shutdown"]
    assert "ramify" in ray.applications


def test_a_deployment_that_fails_is_one_error(ray_serve: Any, ray: FakeRay) -> None:
    """With the last line of what Serve says; Ray that was started ends."""
    ray.failure = RayError("deploying has failed")

    with pytest.raises(ray_serve.DeployError, match="ramify has failed: the model is nowhere"):
        ray_serve.run(here())

    assert ray.calls[-1] == "ray.shutdown"


def test_the_end_of_a_deployment_is_waited_for(ray_serve: Any, ray: FakeRay) -> None:
    """However long it drains; one that is not there is an error which names those that are."""
    ray.applications["ramify"], ray.num_looks = object(), 5
    assert ray_serve.end(here(address="10.0.0.1:6379")) == 0
    assert ray.calls == ["ray.init", "serve.delete", "ray.shutdown"]
    ray.applications["chat"] = object()

    with pytest.raises(ray_serve.DeployError, match=r"no deployment 'ramify' at 10.*but 'chat'"):
        ray_serve.end(here(address="10.0.0.1:6379"))

    assert ray.calls[-1] == "ray.shutdown"
    assert "chat" in ray.applications


def versions(ray_serve: Any, **fields: Any) -> tuple[str, str]:
    """Those of servers and engines: Serve replaces the processes of another one."""
    servers: Deployment = ray_serve.application(here(**fields, ingress={"port": 8000}))
    [_, engines] = servers.arguments
    return servers.options_given["version"], engines.options_given["version"]


def test_only_what_changed_is_replaced(ray_serve: Any) -> None:
    """Engines by what they compute with, servers by their own options, and both by what both read."""
    server, engine = versions(ray_serve)

    assert versions(ray_serve) == (server, engine)
    assert versions(ray_serve, replicas=3, scaling={"wait_s": 9}) == (server, engine)
    of_engines: list[dict[str, Any]] = [
        {"engine": {"page_size": 32}},
        {"resources": {"threads": 2}},
    ]
    for fields in of_engines:
        assert versions(ray_serve, **fields)[0] == server
        assert versions(ray_serve, **fields)[1] != engine
    tls = {"certificate": "a", "key": "b", "authority": "c"}
    of_both: list[dict[str, Any]] = [{"model": "another"}, {"tls": tls}]
    for fields in of_both:
        assert versions(ray_serve, **fields)[0] != server
        assert versions(ray_serve, **fields)[1] != engine
