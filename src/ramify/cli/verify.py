"""`ramify verify`: do all ways to compute give the same bits? And what do quantised weights cost?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ramify.cli.load import announce_load
from ramify.cli.options import DEFAULT_MODEL, AsJson, Model, engine_options, exit_on_error


@engine_options(
    "dtype",
    "quantize",
    "activations",
    "kv_dtype",
    "page_size",
    "device",
    "ops",
    "attention_backend",
    "exact",
)
def verify(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    sample: Annotated[int, typer.Option(min=1, help="Number of random prompts.")] = 8,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on each line.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode for each prompt.")] = 8,
    against_full: Annotated[
        bool,
        typer.Option(
            "--against-full",
            help="Compare next-token distributions of a text with those of full precision instead.",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="The text of --against-full. By default a chapter of Darwin's."),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=2,
            help="Most tokens of that text; logits of 2,048 take 400 MB on disk with a vocabulary of 49,152.",
        ),
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Compute prompts cold, warm, chunked, batched and preempted, and compare every bit.

    Exit code 0 means that nothing differs, 1 that something does.

    --against-full compares something else: the weights as they are, or as --quantize rounds them, with the
    model in float32 and its weights dequantised. `ramify info` shows the result from then on.
    """
    if against_full:
        _compare_with_full(model, engine, text, tokens, as_json=as_json)
        return
    with exit_on_error():
        announce_load(model, engine)
        from ramify.engine.exactness_check import ExactnessCheck, random_prompts, read_prompt_lines
        from ramify.engine.llm import LLM

        llm = LLM(model, progress=True, **engine)
        vocab_size, max_len = llm.engine.model_config.vocab_size, llm.config.max_model_len
        token_ids = (
            random_prompts(sample, vocab_size, max_len)
            if prompts is None
            else read_prompt_lines(llm, prompts)
        )
        if not as_json:
            typer.echo(
                f"{'scenario':24}{'answers':>9}{'logits':>9}{'K/V':>9}{'shared':>9}{'preempted':>11}  bits"
            )
        scenarios = []
        for scenario in ExactnessCheck(llm, token_ids, new_tokens).scenarios():
            scenarios.append(scenario)
            if not as_json:
                num = len(scenario.differences)
                typer.echo(
                    f"{scenario.name:24}{scenario.num_answers:9}{scenario.num_logits:9}"
                    f"{scenario.num_kv:9}{scenario.read_tokens:9}{scenario.preemptions:11}  "
                    + (f"{num} differ" if num else "the same")
                )
    differences = [difference for scenario in scenarios for difference in scenario.differences]
    if as_json:
        typer.echo(json.dumps([asdict(scenario) for scenario in scenarios], indent=2))
    elif differences:
        typer.echo(f"first difference: {differences[0]}")
    raise typer.Exit(1 if differences else 0)


def _compare_with_full(
    model: str, engine: dict[str, Any], text: Path | None, num_tokens: int, *, as_json: bool
) -> None:
    """Measure and print a `WeightLoss`."""
    with exit_on_error():
        from ramify.config import EngineConfig
        from ramify.engine.execution.loss_text import read_source

        read_source(text)
        announce_load(model, engine)
        from ramify.engine.execution.weight_loss import measure_loss

        requested = EngineConfig.of(model=model, **engine)
        loss = measure_loss(requested, text=text, num_tokens=num_tokens, progress=True)
    if as_json:
        typer.echo(json.dumps(asdict(loss), indent=2))
        return
    change = loss.perplexity / loss.full_perplexity - 1
    rows = (
        ("text", f"{loss.num_tokens:,} tokens of {loss.text}, {loss.context:,} at a time"),
        ("perplexity", f"{loss.perplexity:.4f}, {change:+.2%}"),
        ("in full precision", f"{loss.full_perplexity:.4f}"),
        ("KL of the next token", f"{loss.kl:.3g} nats"),
        ("same top token", f"{loss.same_top:.2%}"),
        ("rms error of logits", f"{loss.rms_error:.3g} of their own"),
    )
    for name, value in rows:
        typer.echo(f"{name + ':':24}{value}")
