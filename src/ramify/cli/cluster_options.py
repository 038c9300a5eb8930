"""Options of `ramify serve` and `ramify replica` for engines in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
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
# Engine options that a server over other engines uses: it reads the tokenizer of the model.
OF_THE_CHECKPOINT = ("revision", "offline")


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
