"""Cache directories of several replicas on one machine: each has its own, and its share of the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ramify.tier_options import TierSection, parse_size


def tier_share(engine: Mapping[str, Any], name: str, num_replicas: int) -> dict[str, Any]:
    """The engine options of one of `num_replicas` replicas that are given the same ones.

    A directory has one writer, so each writes to a directory below it. A restart finds its own pages
    by the same name. Readers of another process's pages share its directory.

    Args:
        name: of the replica, the same after a restart.

    Raises:
        ConfigError: `cache_disk` is no size.
    """
    own = dict(engine)
    directory = engine.get("cache_dir")
    if directory is None or engine.get("cache_dir_readonly") or num_replicas < 2:
        return own
    own["cache_dir"] = str(Path(directory) / f"replica-{name}")
    budget = engine.get("cache_disk", TierSection().cache_disk)
    own["cache_disk"] = str(parse_size("cache_disk", budget) // num_replicas)
    return own
