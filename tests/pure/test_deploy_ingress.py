"""The parts of a deployment without Ray: a server over engines that come and go, and an engine's process."""

import asyncio
import logging
import socket
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import httpx2 as httpx
import msgspec
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytest.importorskip("starlette")

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.cluster.local_processes import ReplicaStartError
from ramify.cluster.replica import Replica
from ramify.cluster.routes import CacheRoutes
from ramify.deploy.config import DeployConfig, Resources, config_of
from ramify.deploy.engine_process import EngineProcess
from ramify.deploy.ingress import Ingress, IngressError, open_cluster, serve_options
from ramify.deploy.membership import MeetError, Member, Membership, Roster, Work
from ramify.deploy.scaling import NUM_REQUESTS, WAIT_S
from ramify.errors import ConfigError, NoReplicaError
from ramify.params import SamplingParams
from ramify.server.http.uvicorn_server import DrainingServer
from ramify.server.run import ServeOptions
from tests.pure import cluster_bench
from tests.pure.cluster_bench import prompts, run, until
from tests.pure.engine_bench import expected
from tests.pure.live_server import fake_engine
from tests.pure.test_deploy_config import NOT_INGRESS

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
FAKE = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


class Launcher:
    """Says which engines there are, as Serve does."""

    def __init__(self) -> None:
        self.roster = Roster([])
        self.error = ""
        self.work: list[Work] = []

    async def meet(self, work: Work) -> Roster:
        self.work.append(work)
        if self.error:
            raise MeetError(self.error)
        return self.roster


async def start(number: int) -> tuple[cluster_bench.Member, Member]:
    """An engine over a fake device, with a secret of its own."""
    engine = cluster_bench.Member()
    secret = f"{number}" * 32
    await engine.start(Credentials(secret=secret))
    return engine, Member(f"e{number}", f"127.0.0.1:{engine.port}", secret)


async def end(engine: cluster_bench.Member) -> None:
    engine.gate.is_open = True
    engine.gate.open()
    await engine.replica.close()


def test_a_server_follows_the_launcher(caplog: pytest.LogCaptureFixture) -> None:
    """It connects to engines that come, tells them of their work, and forgets those that have gone."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        launcher, routes = Launcher(), CacheRoutes()
        client = ClusterLLM({}, None, routes=routes)
        membership = Membership(client, routes, launcher.meet, period_s=0.01)
        keeper = asyncio.create_task(membership.keep())
        starting = asyncio.create_task(client.start(10.0))
        engines = [await start(number) for number in range(2)]
        launcher.error = "no engine yet"
        await until(lambda: len(launcher.work) > 5)
        launcher.error, launcher.roster = "", Roster([member for _, member in engines])
        await starting
        await client.all_ready(10.0)
        for ids in prompts(4):
            output = await client.generate(ids, SHORT)
            assert list(output.token_ids) == expected(ids, 4, ends=())
        # Both are named, and have nothing to do once the last reports are there.
        idle = {"e0": (0.0, 0), "e1": (0.0, 0)}
        await until(lambda: dict(launcher.work[-1]) == idle)

        launcher.roster = Roster([engines[1][1]], is_complete=False)
        count = len(launcher.work)
        await until(lambda: len(launcher.work) > count + 2)
        assert not client.dispatch.replicas["e0"].is_leaving  # it may only be slow to answer
        launcher.roster = Roster([engines[1][1]])
        await until(lambda: client.dispatch.replicas["e0"].is_leaving)
        await end(engines[0][0])
        await until(lambda: set(client.dispatch.replicas) == {"e1"})
        output = await client.generate(prompts(1)[0], SHORT)
        assert list(output.token_ids) == expected(prompts(1)[0], 4, ends=())

        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await client.aclose()
        await end(engines[1][0])

    run(main())

    assert caplog.text.count("the engines cannot be listed: no engine yet") == 1


def test_engines_and_servers_show_certificates(tmp_path: Path) -> None:
    """With files that are given; who has the secret of an engine but no certificate is refused."""
    certificates = pytest.importorskip(
        "tests.certificates", reason="cryptography is not installed (pip install ramify[dev])"
    )
    ours = certificates.Authority.make("ours").credentials("engine.chat")
    tls = certificates.write(ours, tmp_path / "tls", name="engine.chat")
    secret = "s" * 32

    async def main() -> None:
        llm, _ = fake_engine()
        replica = Replica(llm, tls.credentials(secret))
        address = f"127.0.0.1:{await replica.start()}"
        launcher = Launcher()
        launcher.roster = Roster([Member("e", address, secret)])
        options = ServeOptions(model="ramify-tiny")
        async with open_cluster(options, launcher.meet, tls, stride=8) as client:
            output = await client.generate("Hello", SHORT)
            assert output.usage.completion_tokens == 4
            routes = client.dispatch.routes
            assert isinstance(routes, CacheRoutes)
            assert routes.router.mirrors.index.stride == 8
        for shown in (Credentials(secret=secret), tls.credentials("t" * 32)):
            stranger = ClusterLLM({"e": address}, None, credentials=shown)
            with pytest.raises(NoReplicaError, match=r"without|secret of the cluster"):
                await stranger.start(3.0)
        await replica.close()

    run(main())


def fake_process(folder: Path, *, now: list[float], **engine: str) -> EngineProcess:
    """One whose child loads no model."""
    config = DeployConfig(
        engine={"folder": str(folder), **engine}, resources=Resources(cpus=4, threads=3), drain_s=1
    )
    return EngineProcess(config, "127.0.0.1", memory_parts=2, command=FAKE, clock=lambda: now[0])


def test_an_engine_s_process_says_where_it_is(tmp_path: Path) -> None:
    """Its name, address and secret; what a server says of the work there counts for a while."""
    now = [0.0]
    process = fake_process(tmp_path, now=now)

    async def main() -> None:
        await process.start()
        member = process.meet({"other": (9.0, 9)})
        assert member.address == f"127.0.0.1:{process.pid}"  # the port of the fake
        assert len(member.secret) == 64
        assert member.secret not in repr(member)
        assert process.stats() == {WAIT_S: 0.0, NUM_REQUESTS: 0.0}
        process.meet({member.name: (1.5, 3)})
        assert process.stats() == {WAIT_S: 1.5, NUM_REQUESTS: 3.0}
        now[0] = 11.0
        assert process.stats() == {WAIT_S: 0.0, NUM_REQUESTS: 0.0}
        await process.stop()
        assert process.pid is None

    run(main())

    [starts] = tmp_path.glob("*.starts")
    assert starts.read_text().split()[1] == "3"  # threads, whatever the launcher has set
    [memory] = tmp_path.glob("*.memory")
    assert memory.read_text().split()[0] == "2"


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The launcher gets the text; nothing is left."""
    process = fake_process(tmp_path, now=[0.0], fails="0123456789abcdef")
    process._child._spec = msgspec.structs.replace(process._child._spec, name="0")

    with pytest.raises(ReplicaStartError, match="the model is nowhere"):
        run(process.start())

    assert process.pid is None


def has_closed(listener: DrainingServer) -> bool:
    return not listener._acceptors


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_server_takes_another_one_s_place_at_the_same_port() -> None:
    """A stream goes on at the one that drains; whoever connects meanwhile gets the other one."""

    async def main() -> None:
        llm, _ = fake_engine()
        replica = Replica(llm, Credentials(secret="s" * 32))
        port = await replica.start()
        launcher = Launcher()
        launcher.roster = Roster([Member("e", f"127.0.0.1:{port}", "s" * 32)])
        options = ServeOptions(model="ramify-tiny", port=free_port(), drain_s=20.0)
        url = f"http://127.0.0.1:{options.port}"
        first, second = Ingress(options), Ingress(options)
        body = {"prompt": "Hello", "max_tokens": 1500, "stream": True, "ignore_eos": True}

        await first.open(launcher.meet)
        await first.listen()
        async with httpx.AsyncClient(timeout=30.0) as client:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                await second.open(launcher.meet)
                await second.listen()
                closing = asyncio.create_task(first.close())
                assert first._listener is not None
                await until(partial(has_closed, first._listener))
                for _ in range(20):
                    async with httpx.AsyncClient(timeout=30.0) as other:
                        answer = await other.post(
                            f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}
                        )
                        assert answer.status_code == 200, answer.text
                rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in rest[-2]
            await closing
        first_failure = pytest.raises(IngressError, match="has ended")
        with first_failure:
            first.check()
        second.check()
        await second.close()
        await replica.close()

    run(main())


def test_options_of_a_server_are_the_command_s() -> None:
    """HAProxy listens on every address, so keys are asked for as for any public host."""
    config = config_of(
        {
            "engine": {"offline": True, "kv_cache_tokens": 4096},
            "ingress": {"port": 81, "served_model_name": ["a"], "api_key_file": "keys"},
            "drain_s": 3,
        }
    )
    options = serve_options(config)
    assert options.engine == {"offline": True}
    assert (options.port, options.served_names, options.key_file) == (81, ("a",), Path("keys"))
    assert options.drain_s == 3

    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        serve_options(config_of({"ingress": {"haproxy": True}})).keys()
    assert serve_options(config_of({})).keys() is None


def test_a_server_gets_every_field_of_the_file() -> None:
    """No field is read and then forgotten."""
    ingress = {
        "host": "127.0.0.2",
        "port": 81,
        "served_model_name": ["a"],
        "api_key_file": "keys",
        "insecure": True,
        "allowed_hosts": ["a"],
        "allowed_origins": ["http://a"],
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "generation_config": "none",
        "drop_forbidden_tools": True,
        "tools_first": True,
        "prompt_rules": ["date-line"],
        "otlp_endpoint": "http://127.0.0.1:4318",
        "max_connections": 50,
        "max_connections_per_address": 40,
    }
    of_file = {"model": "m", "engine": {"offline": True}, "drain_s": 3, "log_json": True}

    options = serve_options(config_of({"ingress": ingress, "public": "prompts"} | of_file))

    of_engines = {"warm"}  # each computes them when it starts
    names = {"api_keys": "api_key", "log_file": "log_file"}
    same = {
        field.name
        for field in fields(ServeOptions)
        if getattr(options, field.name) == getattr(ServeOptions(), field.name)
    }
    assert {names.get(name, name) for name in same} - of_engines <= NOT_INGRESS.keys()
