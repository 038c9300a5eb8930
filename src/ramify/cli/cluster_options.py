"""Options of `ramify serve` and `ramify replica` for engines in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ramify.config import SECTIONS
from ramify.errors import ConfigError

CLUSTER = "Cluster"
ClusterOption = partial(typer.Option, rich_help_panel=CLUSTER)
Secret = Annotated[
    Path | None,
    ClusterOption(
        "--cluster-secret",
        help="File with the secret that servers and replicas share; `openssl rand -hex 32` makes one.",
    ),
]
Certificate = Annotated[
    Path | None,
    ClusterOption(
        "--cluster-certificate", help="PEM file: certificate of this side; both sides show one."
    ),
]
Key = Annotated[
    Path | None, ClusterOption("--cluster-key", help="PEM file: key of that certificate.")
]
Authority = Annotated[
    Path | None,
    ClusterOption(
        "--cluster-authority", help="PEM file: certificate of the authority that signed both."
    ),
]
CertificateName = Annotated[
    str | None,
    ClusterOption(
        "--cluster-certificate-name",
        help="Name that the certificates of all replicas have (`subjectAltName=DNS:NAME`), where they do "
        "not name the addresses of --replicas.",
    ),
]
Replicas = Annotated[
    str | None,
    ClusterOption(
        help="Number of engines on this machine, each a process; or HOST:PORT,... of engines that "
        "`ramify replica` runs."
    ),
]
Threads = Annotated[
    int | None,
    ClusterOption(
        min=1,
        help="Threads of each engine on this machine. Default: OMP_NUM_THREADS, else the cores "
        "divided by --replicas.",
    ),
]
Stride = Annotated[
    int,
    ClusterOption(
        "--routing-stride",
        min=1,
        help="Remember every N-th page of what replicas have cached: an N-th of the memory, and hits are "
        "expected in steps of N pages. 8 is for a hundred replicas.",
    ),
]
# Engine options that a server over other engines uses: it reads the tokenizer of the model.
OF_THE_CHECKPOINT = ("revision", "offline")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of `ramify serve` for several engines, as they were given."""

    replicas: str | None = None
    threads_per_replica: int | None = None
    credential_files: tuple[Path | None, ...] = ()  # secret, certificate, key, authority
    certificate_name: str | None = None
    routing_stride: int = 1

    @property
    def has_credentials(self) -> bool:
        """Whether a secret, a certificate or its name is given."""
        return any(self.credential_files) or self.certificate_name is not None

    def require_replicas(self) -> None:
        """Raise ConfigError if one of the others is given: a single engine has no use for it."""
        if self.threads_per_replica is not None or self.has_credentials or self.routing_stride != 1:
            raise ConfigError(
                "--threads-per-replica, --routing-stride and --cluster-* are for a server of several "
                "engines; give --replicas N or --replicas HOST:PORT,... too, or leave them out"
            )


def refuse_engine_options(engine: Mapping[str, Any], **defaults: object) -> None:
    """Refuse options of an engine where all engines run elsewhere.

    Args:
        engine: the values of `engine_options`.
        defaults: the command's own.

    Raises:
        ConfigError: one differs from its default.
    """
    for section in SECTIONS.values():
        for field in fields(section):
            name = field.name
            default = defaults.get(name, field.default)
            if name in engine and name not in OF_THE_CHECKPOINT and engine[name] != default:
                flag = name.replace("_", "-")
                raise ConfigError(
                    f"--{flag} is an option of an engine, and --replicas HOST:PORT names engines that "
                    f"run already; give --{flag} to `ramify replica`"
                )
