"""A deployment on Ray Serve: engines and servers as Serve deployments. The only file that imports Ray.

Serve starts, places, checks, scales and replaces the processes, and says which there are. A client's
request never meets it: a server listens at a port of its own, and its tokens come from the engines'
own ports. Serve's proxy would take 425 us of CPU for each token that it passes on and wait for several
to send at once; a server's own port takes 35 us and sends each step's. With `haproxy`, Serve's HAProxy
stands in front of the servers, which then listen at ports that Serve chooses.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import ramify
from ramify.counts import counted
from ramify.deploy.config import DeployConfig, config_of
from ramify.deploy.end_signals import INTERRUPTED, EndSignals
from ramify.deploy.engine_process import STOP_S, EngineProcess
from ramify.deploy.ingress import ingress_of, serve_options
from ramify.deploy.membership import PERIOD_S, Meet, MeetError, Member, Roster, Work
from ramify.deploy.scaling import WaitPolicy
from ramify.errors import MissingPackageError, RamifyError
from ramify.server.http.listen_address import bind_address
from ramify.server.run import log_to_stderr

# Ray reports how it is used over the network unless this is set before it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Lines of several engines are not one line: each names its own.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
# Ray makes a token for each user who starts it, but shows it to a running cluster only if it is told to.
if (Path.home() / ".ray" / "auth_token").exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")
try:
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
    from ray.serve.exceptions import RayServeException
except ImportError as error:
    raise MissingPackageError("Ray", "ray") from error

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HERE = "ramify_only_here"  # resource of a cluster that has one node: its engines are at loopback
OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB; nothing of ours is an object
MEET_S = 5.0  # for all engines to answer a server
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 10.0
# From leaving Serve's list to the drain: servers meet whoever has come in this one's place, and connect.
LEAVE_S = 4 * PERIOD_S
END_S, END_CHECK_S = (
    90.0,
    0.1,
)  # for a deployment to end, beyond its drain; HAProxy takes 36 s of it
MAX_STARTS = 3  # of a replica that cannot start, before the deployment has failed
LOOK_BACK_S, METRICS_PERIOD_S = 5.0, 1.0
# One event loop: gRPC for asyncio can be used in one only, and Serve uses it as well. And asyncio's own.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_USE_UVLOOP": "0"}
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
# What Ray and Serve raise where they cannot do what they are to do.
RAY_ERRORS = (RayError, RayServeException, ConnectionError, TimeoutError, ValueError, RuntimeError)
OF_ENGINES = (
    "model",
    "engine",
    "resources",
    "secret_file",
    "tls",
    "warm",
    "public",
    "drain_s",
    "log_json",
)


class DeployError(RamifyError):
    """Ray cannot run the deployment; the text says why."""


class Engine:
    """A Serve replica: an engine in a child process."""

    async def __init__(self, config: DeployConfig) -> None:  # type: ignore[misc]
        log_to_stderr(config.log_json)
        node = this_node()
        # As many as fit: they share the memory for K/V.
        fitting = int(node["Resources"].get("CPU", 1) // max(config.resources.cpus, 0.001))
        self._process = EngineProcess(
            config,
            LOOPBACK if HERE in node["Resources"] else node["NodeManagerAddress"],
            memory_parts=max(1, min(config.max_replicas, fitting)),
        )
        await self._process.start()

    async def meet(self, work: Work) -> Member:
        """See `EngineProcess.meet`; called by every server."""
        return self._process.meet(work)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `WaitPolicy`."""
        return self._process.stats()

    def check_health(self) -> None:
        """Called by Serve, which replaces this replica if it raises.

        Raises:
            DeployError: the engine has ended, as it does by itself when a step is stuck.
        """
        if self._process.pid is None:
            raise DeployError("the engine's process has ended")

    async def __del__(self) -> None:
        """Called by Serve, whose list this engine has left: drains."""
        if hasattr(self, "_process"):
            if self._process.pid is not None:
                await asyncio.sleep(LEAVE_S)
            await self._process.stop()


class PortServer:
    """A Serve replica: a server at a port of its own."""

    async def __init__(self, config: DeployConfig, engines: Any) -> None:  # type: ignore[misc]
        log_to_stderr(config.log_json)
        self._ingress = ingress_of(config)
        await self._ingress.open(meeting(engines))
        await self._ingress.listen()

    def check_health(self) -> None:
        """Called by Serve, which replaces this replica if it raises."""
        self._ingress.check()

    async def __del__(self) -> None:
        """Called by Serve at the end: drains."""
        if hasattr(self, "_ingress"):
            await self._ingress.close()


class ProxiedServer:
    """A Serve replica: a server at a port that Serve has chosen, behind its HAProxy."""

    async def __init__(self, config: DeployConfig, engines: Any) -> None:  # type: ignore[misc]
        log_to_stderr(config.log_json)
        self._ingress = ingress_of(config)
        await self._ingress.open(meeting(engines))

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve after `__init__`."""
        return self._ingress.app()

    async def __del__(self) -> None:
        """Called by Serve once its own requests have ended."""
        if hasattr(self, "_ingress"):
            await self._ingress.close()


def meeting(engines: Any) -> Meet:
    """How a server meets the engines: a call of all replicas of their deployment, twice a second."""

    async def meet(work: Work) -> Roster:
        try:
            response = engines.broadcast("meet", dict(work))
            results = await response.results_async(timeout_s=MEET_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            raise MeetError(f"{type(error).__name__}: {error}") from error
        members = [result for result in results if isinstance(result, Member)]
        return Roster(members, is_complete=len(members) == len(results))

    return meet


def this_node() -> dict[str, Any]:
    """Address and resources of the node of this process, as Ray has them."""
    node_id = ray.get_runtime_context().get_node_id()
    node: dict[str, Any] = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return node


def build(arguments: dict[str, Any]) -> Any:
    """The application of a Serve config file: `import_path: ramify.deploy.ray_serve:build`.

    Args:
        arguments: the fields of `DeployConfig`.

    Raises:
        ConfigError: see `config_of`.
    """
    return application(config_of(arguments))


def application(config: DeployConfig) -> Any:
    """Engines and servers as an application of Serve."""
    stop_s = config.drain_s + 2 * STOP_S
    common = {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": stop_s,
        "max_constructor_retry_count": MAX_STARTS,
        "rolling_update_percentage": 0.01,  # one at a time
        "logging_config": {"enable_access_log": False},  # of every meeting
    }
    engines = serve.deployment(
        name="engine",
        max_ongoing_requests=1000,
        max_surge_percent=100 if config.surge else 0,
        ray_actor_options={
            "num_cpus": config.resources.cpus,
            "num_gpus": config.resources.gpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        **_replicas(config),
        **common,
    )(Engine)
    server: Any = serve.ingress()(ProxiedServer) if config.ingress.haproxy else PortServer
    servers = serve.deployment(
        name="server",
        num_replicas=config.ingress.count,
        max_ongoing_requests=100_000,  # a server has limits of its own
        max_surge_percent=100,
        ray_actor_options={
            "num_cpus": config.ingress.cpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        **common,
    )(server)
    # Serve itself draws a version each time, and replaces every process at any change.
    of_engine = [getattr(config, field) for field in OF_ENGINES]
    ingress = config.ingress
    of_server = [serve_options(config), ingress.haproxy, config.tls, ingress.routing_stride]
    engines = engines.options(version=version_of(of_engine), _internal=True)
    servers = servers.options(version=version_of(of_server), _internal=True)
    return servers.bind(config, engines.bind(config))


def _replicas(config: DeployConfig) -> dict[str, Any]:
    """The number of engines, or the limits and the policy of it."""
    if config.min_replicas == config.max_replicas:
        return {"num_replicas": config.min_replicas}
    policy = AutoscalingPolicy(
        policy_function=WaitPolicy,
        policy_kwargs={
            "max_wait_s": config.scaling.wait_s,
            "per_replica": config.scaling.requests,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            upscale_delay_s=config.scaling.up_s,
            downscale_delay_s=config.scaling.down_s,
            look_back_period_s=LOOK_BACK_S,
            metrics_interval_s=METRICS_PERIOD_S,
            policy=policy,
        )
    }


def version_of(options: list[Any]) -> str:
    """Equal where processes need not be replaced: Serve replaces those of another version."""
    content = msgspec.json.encode([ramify.__version__, *options], order="sorted", enc_hook=str)
    return hashlib.sha256(content).hexdigest()[:16]


# -- the command -----------------------------------------------------------------------------------


def run(config: DeployConfig) -> int:
    """Deploy, or change what is deployed; returns the exit code.

    Without an address Ray is started here, and everything ends at a signal; a second signal does not
    wait for live requests. With an address, the deployment stays when this returns.

    Raises:
        ConfigError: see `ServeOptions.keys`, or the port is taken.
        DeployError: Ray cannot be reached, or the deployment has failed.
    """
    is_local = config.address is None
    options = serve_options(config)
    if is_local or options.key_file is None:  # else the file is on other machines
        options.keys()
    if is_local:
        for sock in bind_address(options.host, options.port):
            sock.close()
    code = 0
    try:
        connect(config)
        start_serve(config)
        deploy(config)
        sys.stderr.write(banner(config) + "\n")
        if is_local:
            with EndSignals() as signals:
                signals.wait()
                logger.info("live requests have %.0f s to end", config.drain_s)
                delete(config)
            shut_down_serve()
    except KeyboardInterrupt:
        logger.warning("ended at once" if is_local else "what was deployed goes on")
        code = INTERRUPTED
    finally:
        # Ray that was started here ends with all its processes.
        ray.shutdown()
    return code


def connect(config: DeployConfig) -> None:
    """Join the cluster, or start one that nobody else can reach.

    Raises:
        DeployError: it cannot be reached, or started.
    """
    if config.ingress.haproxy:
        os.environ[HAPROXY] = "1"  # read where Serve's controller starts
    surge = 2 if config.surge else 1
    needed = config.max_replicas * surge * config.resources.cpus
    needed += 2 * config.ingress.count * config.ingress.cpus
    with as_deploy_error(f"Ray at {config.address or 'this machine'}"):
        if config.address is None:
            ray.init(
                address="local",
                # Labels: the engines share the cores that there are.
                num_cpus=max(os.cpu_count() or 1, math.ceil(needed)),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                resources={HERE: 1},
            )
        else:
            ray.init(address=config.address)


def start_serve(config: DeployConfig) -> None:
    """Start Serve, unless it runs.

    Raises:
        DeployError: it does not start.
    """
    with as_deploy_error(f"Serve of Ray at {config.address or 'this machine'}"):
        if config.ingress.haproxy:
            http = {"host": config.ingress.host, "port": config.ingress.port}
            serve.start(proxy_location="EveryNode", http_options=http)
        else:
            serve.start(proxy_location="Disabled")


def shut_down_serve() -> None:
    """End Serve's own processes; those that do not end are ended with Ray."""
    try:
        serve.shutdown()
    except RAY_ERRORS as error:
        logger.warning("Serve does not end by itself: %s", error)


@contextmanager
def as_deploy_error(what: str) -> Iterator[None]:
    """Raise what Ray and Serve raise as a DeployError."""
    try:
        yield
    except RAY_ERRORS as error:
        raise DeployError(f"{what}: {type(error).__name__}: {error}") from error


def deploy(config: DeployConfig) -> None:
    """Start the application, or change it: Serve replaces what differs; returns when all is ready.

    Raises:
        DeployError: it has failed.
    """
    prefix = "/" if config.ingress.haproxy else None
    try:
        serve.run(application(config), name=config.name, route_prefix=prefix)
    except RAY_ERRORS as error:
        reason = _reason(config.name) or error
        raise DeployError(f"the deployment {config.name} has failed: {reason}") from error


def _reason(name: str) -> str:
    """The last line of what Serve says of each part that is not well; "" if it says nothing."""
    try:
        application = serve.status().applications.get(name)
    except RAY_ERRORS:  # the error that led here says more
        return ""
    if application is None:
        return ""
    messages = [part.message.strip() for part in application.deployments.values()]
    return "; ".join(message.splitlines()[-1] for message in messages if message)


def end(config: DeployConfig) -> int:
    """Drain and end a deployment; returns the exit code.

    Raises:
        DeployError: Ray cannot be reached, there is no such deployment, or it does not end.
    """
    connect(config)
    try:
        with as_deploy_error(f"Ray at {config.address}"):
            names = serve.status().applications
        if config.name not in names:
            raise DeployError(
                f"there is no deployment {config.name!r} at {config.address}, but "
                f"{', '.join(map(repr, names)) or 'none'}; give the file whose `name` is to end"
            )
        delete(config)
    finally:
        ray.shutdown()
    return 0


def delete(config: DeployConfig) -> None:
    """Let a deployment drain and end; returns when it has. Serve itself would wait for 60 s at most.

    Raises:
        DeployError: it does not end.
    """
    limit_s = config.drain_s + END_S
    deadline_s = time.monotonic() + limit_s
    with as_deploy_error(f"the deployment {config.name}"):
        serve.delete(config.name, _blocking=False)
        while config.name in serve.status().applications:
            if time.monotonic() > deadline_s:
                raise DeployError(
                    f"the deployment {config.name} has not ended within {limit_s:.0f} s, which is "
                    f"`drain_s` and {END_S:.0f} s; `ray status` and the logs of Serve may say why"
                )
            time.sleep(END_CHECK_S)


def banner(config: DeployConfig) -> str:
    """Where the deployment is, and how to change it."""
    ingress = config.ingress
    address = ray.get_runtime_context().gcs_address
    count = str(config.min_replicas)
    if config.max_replicas > config.min_replicas:
        count += f" to {config.max_replicas}"
    rows = {
        "deployment": config.name,
        "model": config.model,
        "engines": f"{count}, each of {counted(config.resources.num_threads, 'thread')}",
        "servers": f"{ingress.count}{' behind HAProxy' if ingress.haproxy else ''}",
        "Ray": address,
        "to change": f"ramify deploy FILE --address {address}",
    }
    lines = [f"  {name:<10}  {value}" for name, value in rows.items()]
    return "\n".join([*lines, "", f"listening on http://{ingress.host}:{ingress.port}"])
