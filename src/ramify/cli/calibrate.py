"""`ramify calibrate`: what the engine's steps take on this machine, for `ramify simulate --cost`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ramify.cli.load import announce_load
from ramify.cli.log_commands import progress_bar, write_json
from ramify.cli.options import DEFAULT_MODEL, Model, engine_options, exit_on_error
from ramify.counts import counted


@engine_options("dtype", "page_size", "max_batch_tokens", "max_model_len", "ops", "exact")
def calibrate(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    max_seconds: Annotated[
        float, typer.Option(help="Begin no measurement after this time.")
    ] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the cost file; - is standard output.")
    ] = None,
) -> None:
    """Measure prefill and decode steps of a model on this machine."""
    with exit_on_error():
        announce_load(model, engine)
        from ramify.analysis.simulation.replays.calibration import calibrate as measure

        with progress_bar() as progress:
            cost = measure(model, max_seconds=max_seconds, progress=progress, **engine)
        if json_file is not None:
            write_json(json_file, cost.to_json())
    if json_file == Path("-"):
        return
    facts = cost.facts
    for length, rate in facts["prefill_tokens_per_s"].items():
        typer.echo(f"prefill of {int(length):>6,} tokens: {rate:>12,.0f} tokens/s")
    for size, seconds in facts["decode_step_s"].items():
        typer.echo(f"decode, batch of {size:>3}:     {seconds * 1e3:>12.3f} ms/step")
    typer.echo(
        f"fit over {counted(facts['num_steps'], 'step')}: {cost.step_s * 1e3:.3f} ms a step, "
        f"{cost.token_s * 1e6:.2f} us a token, {cost.read_s * 1e9:.2f} ns a token read; "
        f"median error {facts['median_error']:.0%}, 90th percentile {facts['p90_error']:.0%}"
    )
