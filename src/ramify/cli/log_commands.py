"""What the commands on logs share: options, Ctrl-C, places of outputs, capacities, progress, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer

from ramify.errors import ConfigError
from ramify.reasons import reason_of

LogFiles = Annotated[list[Path], typer.Argument(help="Files of a log; - is standard input.")]
LogFormat = Annotated[
    str | None, typer.Option("--format", help="Format of the log, if not recognised.")
]
StrictLog = Annotated[bool, typer.Option("--strict", help="A bad line is an error.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write JSON to this file; - is standard output.")
]
CacheProvider = Annotated[
    str | None, typer.Option(help="Cache rule: openai, anthropic, … By default the log's.")
]
CacheRules = Annotated[
    Path | None, typer.Option(help="File of cache rules and prices, before the built-in ones.")
]
ReplicaCapacity = Annotated[
    str | None,
    typer.Option(
        help="Tokens that each server's cache holds, for reads and savings: 5M; with --model "
        "also 24GB. By default nothing is evicted."
    ),
]
SizedModel = Annotated[
    str | None, typer.Option(help="Checkpoint directory or config.json, for a capacity in bytes.")
]

INTERRUPTED = 130  # exit code of Ctrl-C


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Turn Ctrl-C into a line on stderr and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted before there was a result to keep", err=True)
        raise typer.Exit(INTERRUPTED) from None


def exit_interrupted(missing: str) -> NoReturn:
    """Say on stderr what an interrupted run lacks, and end with exit code 130."""
    typer.echo(f"interrupted: {missing}", err=True)
    raise typer.Exit(INTERRUPTED)


def check_outputs(logs: list[Path], outputs: tuple[Path | None, ...]) -> None:
    """Refuse to write over the log, or two outputs into one place."""
    taken = {path.resolve() for path in logs if str(path) != "-"}
    for path in outputs:
        if path is None or path == Path(os.devnull):
            continue
        place = path if str(path) == "-" else path.resolve()
        if place in taken:
            raise ConfigError(
                f"cannot write to {path}: it is the log or another output; name another file"
            )
        taken.add(place)


def read_capacity(capacity: str | None, model: str | None) -> int | None:
    """The option `--capacity` of commands that replay one cache, in tokens.

    Raises:
        ConfigError: it is no capacity, or in bytes without a model.
        ModelError: the model's configuration cannot be used.
    """
    from ramify.analysis.simulation.capacities import parse_capacity
    from ramify.analysis.simulation.kv_bytes import kv_token_bytes

    if capacity is None:
        return None
    return parse_capacity(capacity, token_bytes=None if model is None else kv_token_bytes(model))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        tasks: dict[str, Any] = {}

        def advance(part: str, done: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = bar.add_task(part, total=total or None)
            bar.update(tasks[part], completed=done, total=total or None)

        yield advance


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document to a file, or to standard output."""
    is_ascii = str(path) == "-" and not (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(document, indent=2, ensure_ascii=is_ascii)
    # A log may hold half of a surrogate pair, which has no UTF-8: written as an escape of JSON.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text to a file, or to standard output."""
    with opened(path) as out:
        out.write(text)


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """A file to write, or standard output."""
    if str(path) == "-":
        yield sys.stdout
        return
    try:
        with path.open("w", encoding="utf-8", errors="backslashreplace") as out:
            yield out
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason_of(error, path)}") from error
