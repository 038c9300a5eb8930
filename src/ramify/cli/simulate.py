"""`ramify simulate`: hit rates of a log by capacity, policy and lifetime."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.options import exit_on_error
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.analysis.simulation.results import Simulation

INTERRUPTED = 130  # exit code of Ctrl-C


def simulate(
    trace: Annotated[list[Path], typer.Argument(help="Files of a log, as `ramify analyze` reads.")],
    capacity: Annotated[
        str, typer.Option(help="Capacities in tokens: 1M,2M; with --model also 24GB.")
    ] = "1M,2M,5M,10M",
    policy: Annotated[str, typer.Option(help="Eviction policies to replay.")] = "lru,auto",
    ttl: Annotated[str, typer.Option(help="Lifetimes: 300, 5m or 1h.")] = "1m,5m,10m,30m,1h",
    page_size: Annotated[
        int | None,
        typer.Option(help="Tokens per page. Unset: blocks of a hashed trace, 16 for texts."),
    ] = None,
    insert_outputs: Annotated[
        bool, typer.Option("--insert-outputs", help="Cache answers too.")
    ] = False,
    warm_up: Annotated[
        float, typer.Option(help="Share of the requests that fill the cache, not counted.")
    ] = 0.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file; - is standard output.")
    ] = None,
) -> None:
    """Simulate a prefix cache on a log: hit rate by capacity and policy, bounds, lifetimes."""
    with exit_on_error():
        from ramify.analysis.simulation.calls import simulate as run_simulation

        with progress_bar() as progress:
            result = run_simulation(
                trace,
                capacity=capacity,
                policy=policy,
                ttl=ttl,
                page_size=page_size,
                insert_outputs=insert_outputs,
                warm_up=warm_up,
                progress=progress,
            )
        if json_file is not None:
            _write_json(json_file, result.to_json())
    if json_file != Path("-"):
        typer.echo(summary(result))
    if result.is_partial:
        typer.echo("interrupted: parts are missing", err=True)
        raise typer.Exit(INTERRUPTED)


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
                tasks[part] = bar.add_task(part, total=total)
            bar.update(tasks[part], completed=done, total=total)

        yield advance


def summary(result: Simulation) -> str:
    """The result as text."""
    from ramify.analysis.simulation.capacities import capacity_label

    facts = result.facts
    counts = "" if facts.is_exact else ", estimated"
    head = f"{facts.num_requests:,} requests, {facts.num_tokens:,} input tokens{counts}"
    lines = [f"{head}, pages of {facts.page_size}", ""]
    columns: dict[str, dict[int, float]] = {
        "LRU, one pass": dict(result.one_pass_lru),
        **result.curve,
        "Belady": dict(result.belady),
    }
    lines.append(f"{'capacity':>10}" + "".join(f"{name:>15}" for name in columns))
    for capacity in result.one_pass_lru:
        rates = "".join(
            f"{rates[capacity]:>15.2%}" if capacity in rates else f"{'-':>15}"
            for rates in columns.values()
        )
        lines.append(f"{capacity_label(capacity):>10}{rates}")
    lines += [f"{'infinite':>10}{result.infinite:>15.2%}", ""]
    if result.ttl:
        lines.append("lifetime, without a limit of size:")
        lines += [f"{lifetime:>9g}s{rate:>15.2%}" for lifetime, rate in result.ttl.items()]
    else:
        lines.append("no lifetimes: the log has requests without a time")
    lines.append("hit rates are shares of all input tokens" + _warm_up(facts.warm_up))
    return "\n".join(lines)


def _warm_up(share: float) -> str:
    return f" after the first {share:.0%} of the requests" if share else ", from a cold cache on"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if str(path) == "-":
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
