"""`DeployConfig`: the file that describes a deployment, in YAML or JSON."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ramify.cluster.credentials import TlsFiles
from ramify.config import EngineConfig
from ramify.errors import ConfigError, MissingPackageError, UnknownOptionError
from ramify.prompt_rules import rules_named
from ramify.reasons import reason_of

MAX_REPLICAS = MAX_THREADS = 1024
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
ONE_PROCESS = (
    "an engine of a cluster computes in one process, so there is nothing to place in a group; leave it out, and "
    "give `resources.cpus` and `resources.threads` what one engine can use"
)
# What to use in place of a name that other launchers have.
ADVICE = {
    **dict.fromkeys(
        ("tensor_parallel", "tensor_parallel_size", "placement_group_bundles", "bundles"),
        ONE_PROCESS,
    ),
    "autoscaling_config": "give `replicas` a `min` and a `max`, and `scaling` its limits",
    "num_replicas": "give `replicas`",
    "max_ongoing_requests": "give `scaling.requests`",
    "model_id": "give `model`",
    "model_source": "give `model`",
    "engine_kwargs": "give `engine`",
    "accelerator_type": "give `resources.gpus`",
    "runtime_env": "install Ramify in the image of every node",
}


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the file whose fields all have names of their own."""


class Replicas(Section, frozen=True, kw_only=True):
    """How many engines; between `min` and `max` as the load needs."""

    min: int = 1
    max: int = 1


class Resources(Section, frozen=True, kw_only=True):
    """What Ray sets aside for one engine."""

    cpus: float = 1.0
    gpus: float = 0.0
    threads: int | None = None  # of the engine, on which its bits depend; None: whole cpus

    @property
    def num_threads(self) -> int:
        """Threads of every engine."""
        return self.threads or max(1, int(self.cpus))


class Scaling(Section, frozen=True, kw_only=True):
    """When engines are added, and when they are taken away."""

    wait_s: float = 2.0  # of computing that may wait at an engine
    requests: int = 32  # for each engine, waiting ones included
    up_s: float = 10.0  # that a load must last
    down_s: float = 300.0


class Ingress(Section, frozen=True, kw_only=True):
    """The servers that clients connect to; see `ramify serve` for what is called as there."""

    host: str = "127.0.0.1"
    port: int = 8000
    count: int = 1
    haproxy: bool = False  # Serve's HAProxy listens at the port, on every node
    cpus: float = 0.0
    served_model_name: list[str] = []
    api_key_file: str | None = None
    insecure: bool = False
    allowed_hosts: list[str] = []
    allowed_origins: list[str] = []
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    generation_config: str = "auto"
    drop_forbidden_tools: bool = False
    tools_first: bool = False
    prompt_rules: list[str] = []
    otlp_endpoint: str | None = None
    max_connections: int | None = None  # of each server; without `haproxy`, which has the listener
    max_connections_per_address: int | None = None
    routing_stride: int = 1


class DeployConfig(Section, frozen=True, kw_only=True):
    """A deployment. Paths are those of the nodes on which they are read."""

    name: str = "ramify"  # of the application in Serve
    model: str = "ramify-tiny"
    engine: dict[str, Any] = {}  # options of `ramify serve` that are an engine's, by the same names
    replicas: int | Replicas = 1
    resources: Resources = Resources()
    scaling: Scaling = Scaling()
    ingress: Ingress = Ingress()
    secret_file: str | None = None  # None: every engine draws a secret
    tls: TlsFiles | None = None  # certificates of engines and servers, which then encrypt
    warm: str | None = None
    public: str | None = None
    surge: bool = False  # an update starts an engine before it ends another
    drain_s: float = 30.0
    log_json: bool = False
    address: str | None = None  # of a Ray cluster; None: one is started here

    @property
    def min_replicas(self) -> int:
        """Engines at least."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.min

    @property
    def max_replicas(self) -> int:
        """Engines at most."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max

    def check(self) -> DeployConfig:
        """The same, if every value is within its limits.

        Raises:
            ConfigError: one is not; says which, and its limits.
        """
        for name, value, least, most in (
            ("replicas.min", self.min_replicas, 1, MAX_REPLICAS),
            ("replicas.max", self.max_replicas, self.min_replicas, MAX_REPLICAS),
            ("resources.cpus", self.resources.cpus, 0, math.inf),
            ("resources.gpus", self.resources.gpus, 0, math.inf),
            ("resources.threads", self.resources.threads, 1, MAX_THREADS),
            ("scaling.wait_s", self.scaling.wait_s, 0.01, math.inf),
            ("scaling.requests", self.scaling.requests, 1, math.inf),
            ("scaling.up_s", self.scaling.up_s, 0, math.inf),
            ("scaling.down_s", self.scaling.down_s, 0, math.inf),
            ("ingress.port", self.ingress.port, 1, 65535),
            ("ingress.count", self.ingress.count, 1, MAX_REPLICAS),
            ("ingress.cpus", self.ingress.cpus, 0, math.inf),
            ("ingress.routing_stride", self.ingress.routing_stride, 1, math.inf),
            ("ingress.max_connections", self.ingress.max_connections, 1, math.inf),
            (
                "ingress.max_connections_per_address",
                self.ingress.max_connections_per_address,
                1,
                math.inf,
            ),
            ("drain_s", self.drain_s, 0, math.inf),
        ):
            if value is not None and not least <= value <= most:
                limits = f"in {least}..{most}" if most < math.inf else f"{least} or more"
                raise ConfigError(f"{name} is {value} but it must be {limits}")
        if NAME.fullmatch(self.name) is None:
            raise ConfigError(
                f"name is {self.name!r} but it must be of a-z, 0-9 and '-', at most 42 characters"
            )
        if "model" in self.engine:
            raise ConfigError("engine.model is given; the model stands beside `engine`, as `model`")
        engine = EngineConfig.of(model=self.model, **self.engine)
        if engine.ranks.tensor_parallel_size > 1:
            size = engine.ranks.tensor_parallel_size
            raise ConfigError(f"engine.tensor_parallel_size is {size}; {ONE_PROCESS}")
        rules_named(self.ingress.prompt_rules, "ingress.prompt_rules")
        return self


SECTIONS: dict[str, type[Struct]] = {
    "replicas": Replicas,
    "resources": Resources,
    "scaling": Scaling,
    "ingress": Ingress,
    "tls": TlsFiles,
}


def read_config(path: Path) -> DeployConfig:
    """Read a file: JSON if its name ends in `.json`, else YAML.

    Raises:
        ConfigError: it cannot be read, or a value is wrong.
        UnknownOptionError: it has a name that no field has.
        MissingPackageError: it is YAML, and PyYAML is not installed.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the deployment's file {path} cannot be read: {reason_of(error, path)}"
        ) from error
    try:
        if path.suffix == ".json":
            document = msgspec.json.decode(content)
        else:
            document = msgspec.yaml.decode(content)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except ImportError:
        raise MissingPackageError("PyYAML", "ray") from None
    return config_of({} if document is None else document)


def config_of(document: object) -> DeployConfig:
    """The deployment that a decoded document describes; `-` in its names is `_`.

    Raises:
        ConfigError: a value is wrong.
        UnknownOptionError: it has a name that no field has.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"a deployment is a mapping of names, not {type(document).__name__}")
    values = _known_names(document, DeployConfig)
    for name, section in SECTIONS.items():
        if isinstance(values.get(name), dict):
            values[name] = _known_names(values[name], section, f"{name}.")
    if isinstance(values.get("engine"), dict):
        values["engine"] = {
            str(name).replace("-", "_"): value for name, value in values["engine"].items()
        }
    try:
        config = msgspec.convert(values, DeployConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return config.check()


def _known_names(
    mapping: dict[Any, Any], section: type[Struct], prefix: str = ""
) -> dict[str, Any]:
    """The entries of a mapping by the names of fields.

    Raises:
        UnknownOptionError: a name is no field's.
    """
    known = section.__struct_fields__
    values = {}
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name not in known:
            fields = [f"{prefix}{field}" for field in known]
            raise UnknownOptionError(f"{prefix}{key}", fields, ADVICE.get(name, ""))
        values[name] = value
    return values
