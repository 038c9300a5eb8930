"""`ramify deploy`: a server and its engines on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ramify.cli.options import exit_on_error
from ramify.errors import ConfigError


def deploy(
    config: Annotated[
        Path, typer.Argument(help="YAML or JSON file that describes the deployment.")
    ],
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, in place of the file's; HOST:PORT, or auto."),
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Drain and end the deployment of this name.")
    ] = False,
) -> None:
    """Run a server and its engines on Ray, or change those that run.

    Without an address, Ray is started on this machine, and everything ends with this command.
    """
    with exit_on_error():
        import msgspec

        from ramify.deploy.config import read_config

        deployment = read_config(config)
        if address is not None:
            deployment = msgspec.structs.replace(deployment, address=address)
        if delete and deployment.address is None:
            raise ConfigError(
                "--delete needs --address, or `address` in the file: of the Ray cluster"
            )
        from ramify.deploy.ray_serve import end, run
        from ramify.server.run import log_to_stderr

        log_to_stderr(deployment.log_json)
        code = end(deployment) if delete else run(deployment)
    raise typer.Exit(code)
