"""`ramify warm`: compute prompts once, and leave their K/V in a cache directory or on a shared server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.load import announce_load
from ramify.cli.options import (
    DEFAULT_MODEL,
    MODEL_HELP,
    PANELS,
    engine_options,
    exit_on_error,
)
from ramify.counts import counted
from ramify.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from ramify.engine.cache_admin.warmup import WarmPrompt, WarmupResult
    from ramify.engine.llm import LLM


@engine_options(panels=PANELS)
def warm(
    engine: dict[str, Any],
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of prompts, as `ramify serve --warm` reads them."),
    ],
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = DEFAULT_MODEL,
) -> None:
    """Fill --cache-dir or --cache-store with the K/V of prompts, before any server runs.

    A server with the same model and options reads it. Exit code 1 if a prompt was refused.
    """
    with exit_on_error():
        is_written = engine["cache_dir"] is not None and not engine["cache_dir_readonly"]
        if not is_written and engine["cache_store"] is None:
            raise ConfigError(
                "nothing would be left of what is computed; give --cache-dir DIR (without "
                "--cache-dir-readonly) or --cache-store URL"
            )
        announce_load(model, engine)
        from ramify.engine.cache_admin.warmup import WarmupResult, read_prompts
        from ramify.engine.llm import LLM

        prompts = [prompt for file in files for prompt in read_prompts(file)]
        with LLM(model, progress=True, **engine) as llm:
            groups = _groups(prompts, llm)
            results = [_computed_and_written(group, llm) for group in groups]
            stats = llm.stats()
    result = WarmupResult.sum(results)
    typer.echo(
        f"{counted(result.num_prompts, 'prompt')}: {counted(result.computed_tokens, 'token')} computed, "
        f"{result.found_tokens:,} found"
    )
    for tier, figures in stats.tiers.items():
        typer.echo(
            f"{tier}: {counted(figures.written_pages, 'page')} written, {figures.refused_pages:,} refused"
        )
    for error in result.errors:
        typer.echo(f"refused: {error}", err=True)
    if result.num_failed:
        raise typer.Exit(1)


def _groups(prompts: list[WarmPrompt], llm: LLM) -> Iterator[list[WarmPrompt]]:
    """Prompts in groups of half the pool: what is evicted for the next group is written by then."""
    group: list[WarmPrompt] = []
    num_tokens, most = 0, llm.config.kv_cache_tokens // 2
    for prompt in prompts:
        try:
            length = len(prompt.ids(llm.tokenizer))
        except RequestError:  # the warm-up says why
            length = 0
        if group and num_tokens + length > most:
            yield group
            group, num_tokens = [], 0
        group.append(prompt)
        num_tokens += length
    if group:
        yield group


def _computed_and_written(group: list[WarmPrompt], llm: LLM) -> WarmupResult:
    from ramify.engine.core import EngineCore

    result = llm.cache.warm(group)
    llm.run(EngineCore.flush_tiers)
    return result
