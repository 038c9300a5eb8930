"""`ramify generate`: continue prompts, or answer them by chat template."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.load import announce_load
from ramify.cli.options import (
    DEFAULT_MODEL,
    PANELS,
    AsJson,
    Model,
    engine_options,
    exit_on_error,
    milliseconds,
)
from ramify.counts import counted
from ramify.errors import ConfigError
from ramify.reasons import reason_of

if TYPE_CHECKING:
    from ramify.outputs import RequestOutput


@engine_options(panels=PANELS)
def generate(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; repeat the flag for several.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File with one prompt; - is standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send prompts as user messages, by chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message, or @FILE; implies --chat.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest with this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end-of-sequence token.")
    ] = False,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens to report.")] = None,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr; unset: with two prompts, on a terminal."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with any supported checkpoint; shared prefixes are computed once."""
    with exit_on_error():
        texts = [*(prompt or ()), *(_read(path) for path in prompt_file or ())]
        if not texts:
            raise ConfigError("no prompt given; use --prompt TEXT or --prompt-file FILE")
        announce_load(model, engine)
        from ramify.engine.llm import LLM
        from ramify.params import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        # Its end writes the pages that are cached to the tiers.
        with LLM(model, progress=True, **engine) as llm:
            if chat or system is not None:
                conversations = [_messages(system, text) for text in texts]
                outputs = llm.chat(conversations, params, progress=progress)
            else:
                outputs = llm.generate(texts, params, progress=progress)
    if as_json:
        answers = [_output_json(output) for output in outputs]
        typer.echo(json.dumps(answers, indent=2, ensure_ascii=False))
    else:
        for output in outputs:
            typer.echo(output.text if output.error is None else "")
            typer.echo(_summary(output), err=True)
    raise typer.Exit(2 if any(output.error is not None for output in outputs) else 0)


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    question = {"role": "user", "content": text}
    if system is None:
        return [question]
    content = _read(Path(system[1:])) if system.startswith("@") else system
    return [{"role": "system", "content": content}, question]


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error, path)}") from error


def _summary(output: RequestOutput) -> str:
    if output.error is not None:
        return f"error: {output.error}"
    cache, metrics = output.cache, output.metrics
    speed = metrics.decode_tokens_per_s
    return (
        f"[{output.finish_reason.value}] prompt {counted(cache.prompt_tokens, 'token')}: "
        f"{cache.read_tokens} read, {cache.shared_tokens} shared, {cache.computed_tokens} computed; "
        f"output {counted(len(output.token_ids), 'token')}; first after {milliseconds(metrics.ttft_s or 0.0)}"
        + (f", then {speed:.1f} tokens/s" if speed else "")
    )


def _output_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "prompt_tokens": len(output.prompt_token_ids),
        "cache": asdict(output.cache),
        "metrics": asdict(output.metrics),
        "logprobs": None
        if output.logprobs is None
        else [asdict(logprob) for logprob in output.logprobs],
        "error": None if output.error is None else str(output.error),
    }
