"""The `ramify` command, one file for each subcommand.

`options.py` makes the engine's flags from the fields of `ramify.config`. `log_commands.py` has the options
and exits that the commands on logs share. The commands import torch and the engine when they run, so
that `ramify --help` is quick. This is the top layer: nothing imports it.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from ramify import __version__
from ramify.cli.analyze import analyze
from ramify.cli.cache import cache
from ramify.cli.calibrate import calibrate
from ramify.cli.chat import chat
from ramify.cli.demo import demo
from ramify.cli.deploy import deploy
from ramify.cli.explain import explain
from ramify.cli.generate import generate
from ramify.cli.info import info
from ramify.cli.lint import lint
from ramify.cli.replica import replica
from ramify.cli.serve import keys, serve
from ramify.cli.simulate import simulate
from ramify.cli.top import top
from ramify.cli.usage_errors import Command, Group
from ramify.cli.verify import verify
from ramify.cli.warm import warm
from ramify.errors import MissingPackageError

app = typer.Typer(
    cls=Group,
    help="LLM inference that never computes the same prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    serve,
    replica,
    deploy,
    chat,
    keys,
    demo,
    generate,
    info,
    top,
    verify,
    analyze,
    lint,
    explain,
    simulate,
    calibrate,
    warm,
):
    app.command(cls=Command)(command)
app.add_typer(cache, name="cache")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"ramify {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    """Entry point of the `ramify` command."""
    # `generate` prints the error of each output.
    logging.getLogger("ramify.engine.offline").disabled = True
    try:
        app()
    except ModuleNotFoundError as error:
        missing = MissingPackageError.of(error)
        if missing is None:
            raise
        typer.echo(f"error: {missing}", err=True)
        sys.exit(2)
