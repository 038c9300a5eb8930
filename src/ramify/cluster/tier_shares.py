"""Cache directories of several replicas on one machine: each has its own, and its share of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.tier_options import TierSection, parse_size


def has_own_directory(engine: Mapping[str, Any]) -> bool:
    """Whether an engine with these options writes to a cache directory, which can have one writer only.

    Readers of another process's pages share its directory.
    """
    return engine.get("cache_dir") is not None and not engine.get("cache_dir_readonly")


def tier_share(engine: Mapping[str, Any], name: str, num_replicas: int) -> dict[str, Any]:
    """The engine options of one of `num_replicas` replicas that are given the same ones.

    Each writes to a directory below theirs, which it finds by its name after a restart.

    Args:
        name: of the replica, the same after a restart.

    Raises:
        ConfigError: `cache_disk` is no size.
    """
    if num_replicas < 2 or not has_own_directory(engine):
        return dict(engine)
    return with_directory(engine, Path(engine["cache_dir"]) / f"replica-{name}", num_replicas)


def with_directory(engine: Mapping[str, Any], directory: Path, num_replicas: int) -> dict[str, Any]:
    """The engine options of a replica that writes to a directory, with its share of the budget.

    Raises:
        ConfigError: `cache_disk` is no size.
    """
    budget = engine.get("cache_disk", TierSection().cache_disk)
    share = parse_size("cache_disk", budget) // num_replicas
    return {**engine, "cache_dir": str(directory), "cache_disk": str(share)}
