"""The first line of a command that loads a model, after the checks that need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer


def announce_load(model: str, engine: Mapping[str, Any]) -> None:
    """Print to stderr that a model loads; wrong options, names and cache directories are errors at once.

    A name that only the hub may have is looked up here, and a line says so.

    Args:
        engine: options of the engine, without the model.

    Raises:
        ConfigError: an option has an impossible value, or another process writes the cache directory.
        CheckpointError: there is no such model.
    """
    from ramify.config import EngineConfig
    from ramify.kv.stores.store_directory import check_unlocked
    from ramify.models.checkpoint.find import find_checkpoint, find_here

    config = EngineConfig.of(model=model, **engine)
    if find_here(model) is None:
        typer.echo(
            f"{model} is not here: looking among cached hub models, then on the hub", err=True
        )
        find_checkpoint(model, revision=config.model.revision, offline=config.model.offline)
    directory = config.tiers.cache_dir
    if directory is not None and not config.tiers.cache_dir_readonly:
        check_unlocked(Path(directory).expanduser())
    typer.echo(f"loading {model}: PyTorch and its kernels first", err=True)
