"""`ramify simulate`: hit rates of a log by capacity, policy and lifetime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.log_commands import (
    JsonFile,
    LogFormat,
    StrictLog,
    check_outputs,
    exit_interrupted,
    exit_on_interrupt,
    progress_bar,
    write_json,
)
from ramify.cli.options import exit_on_error
from ramify.counts import counted

if TYPE_CHECKING:
    from ramify.analysis.simulation.results import Simulation


def simulate(
    trace: Annotated[list[Path], typer.Argument(help="Files of a log, as `ramify analyze` reads.")],
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Capacities in tokens: 1M,2M; with --model also 24GB. Unset: four that fit the log."
        ),
    ] = None,
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
    end_sessions: Annotated[
        str | None,
        typer.Option(help="Replay again, each session ended so long after its last request: 10."),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(help="File of `ramify calibrate`: replay the engine, with TTFT."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Of the engine, with --cost.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(help="Of the engine, with --cost.")] = 512,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint directory or config.json, for sizes in bytes.")
    ] = None,
    log_format: LogFormat = None,
    strict: StrictLog = False,
    json_file: JsonFile = None,
) -> None:
    """Simulate a prefix cache on a log: hit rate by capacity and policy, bounds, lifetimes."""
    with exit_on_error(), exit_on_interrupt():
        from ramify.analysis.simulation.calls import simulate as run_simulation

        check_outputs(trace, (json_file,))
        with progress_bar() as progress:
            result = run_simulation(
                trace,
                capacity=capacity,
                policy=policy,
                ttl=ttl,
                page_size=page_size,
                insert_outputs=insert_outputs,
                warm_up=warm_up,
                end_sessions=end_sessions,
                cost=cost,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                model=model,
                format=log_format,
                strict=strict,
                progress=progress,
            )
        if json_file is not None:
            write_json(json_file, result.to_json())
    if json_file != Path("-"):
        typer.echo(summary(result))
    if result.is_partial:
        exit_interrupted("parts are missing")


def summary(result: Simulation) -> str:
    """The result as text."""
    from ramify.analysis.simulation.capacities import capacity_label

    facts, extra = result.facts, result.extra
    counts = ", estimated" if "estimated" in facts.token_counts else ""
    head = f"{counted(facts.num_requests, 'request')}, {counted(facts.input_tokens, 'input token')}{counts}"
    lines = [f"{head}, pages of {facts.page_size}", *_quality_lines(result), ""]
    doubled = {int(capacity): rate for capacity, rate in extra.get("double_capacity", {}).items()}
    columns = {"LRU": dict(result.one_pass_lru), "2x memory": doubled}
    columns |= {f"replay {name}": rates for name, rates in result.curve.items()}
    ended = extra.get("ended_sessions", {"curve": {}})
    for name, rates in ended["curve"].items():
        columns[f"{name}, ended"] = {int(capacity): rate for capacity, rate in rates.items()}
    columns["Belady"] = dict(result.belady)
    lines.append(f"{'capacity':>10}" + "".join(f"{name:>16}" for name in columns))
    kv = extra.get("kv")
    for capacity in result.one_pass_lru:
        rates = "".join(
            f"{rates[capacity]:>16.2%}" if capacity in rates else f"{'-':>16}"
            for rates in columns.values()
        )
        size = f"  {kv['gigabytes'][str(capacity)]:,.2f} GB" if kv else ""
        lines.append(f"{capacity_label(capacity):>10}{rates}{size}")
    lines += [f"{'infinite':>10}{result.infinite:>16.2%}", ""]
    if ended["curve"]:
        how = "inferred from prefixes" * ended["is_inferred"] or "as logged"
        lines.append(
            f"ended: {counted(ended['num_sessions'], 'session')} ({how}), each ended {ended['after_s']:g} s "
            "after its last request"
        )
    if result.ttl:
        lines.append("lifetime since the last use, without a limit of size:")
        lines += [f"{lifetime:>9g}s{rate:>16.2%}" for lifetime, rate in result.ttl.items()]
    else:
        lines.append("no lifetimes: the log has requests without a time")
    lines += _engine_lines(extra)
    lines.append("hit rates are shares of all input tokens" + _warm_up(facts.warm_up))
    return "\n".join(lines)


def _quality_lines(result: Simulation) -> list[str]:
    facts, quality = result.facts, result.extra.get("quality", {})
    num_bad = len(quality.get("bad_lines", ()))
    return [
        f"{what}: {count:,}"
        for count, what in (
            (num_bad, "bad lines, skipped (--json lists them)"),
            (facts.requests_without_prompt, "requests without a prompt, skipped"),
            (
                facts.requests_with_cut_text,
                "requests with cut text, of which the sharing is a guess",
            ),
        )
        if count
    ]


def _engine_lines(extra: Mapping[str, Any]) -> list[str]:
    from ramify.analysis.simulation.capacities import capacity_label

    if "engine" not in extra:
        return []
    lines = ["", "the engine, with the cost of its steps:"]
    lines.append(
        f"{'capacity':>10}{'policy':>10}{'hit rate':>10}{'TTFT p50':>12}{'p90':>12}{'p99':>12}"
        f"{'preempted':>11}{'refused':>9}"
    )
    for policy, runs in extra["engine"]["runs"].items():
        for capacity, run in runs.items():
            times = "".join(f"{run[f'ttft_p{share}_s']:>11.3f}s" for share in (50, 90, 99))
            lines.append(
                f"{capacity_label(int(capacity)):>10}{policy:>10}{run['hit_rate']:>10.2%}{times}"
                f"{run['preemptions']:>11,}{run['num_refused']:>9,}"
            )
    return [*lines, ""]


def _warm_up(share: float) -> str:
    return f" after the first {share:.0%} of the requests" if share else ", from a cold cache on"
