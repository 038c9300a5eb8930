"""The safetensors files of a checkpoint: which there are, opening them, the names in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ramify.errors import CheckpointError, LibraryPanicError, shortened
from ramify.library_panics import panics_as_errors
from ramify.models.checkpoint.find import INDEX, PICKLED_ONLY, pickled_weights
from ramify.models.configs.checkpoint_files import check_checkpoint_file
from ramify.models.configs.fields import read_json
from ramify.reasons import reason_of


def read_ahead(files: set[Path]) -> None:
    """Ask the system to read all files at once; it does so while layers are prepared."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file; raises CheckpointError where it cannot be read."""
    try:
        check_checkpoint_file(file)
        with (
            panics_as_errors("safetensors"),
            safe_open(file, framework="pt", device="cpu") as shard,
        ):
            yield shard
    except (SafetensorError, OSError, LibraryPanicError) as error:
        raise CheckpointError(
            f"{file} is corrupt or truncated ({reason_of(error, file)}); download it again"
        ) from error


def tensor_names(path: Path) -> set[str]:
    """Names of all tensors in a checkpoint's files.

    Raises:
        CheckpointError: see `load_weights`.
    """
    names: set[str] = set()
    for file in weight_files(path):
        with opened(file) as shard:
            names |= set(shard.keys())
    return names


def weight_files(path: Path) -> dict[Path, frozenset[str]]:
    """Safetensors files of a checkpoint, each with the tensors that the index says it holds.

    A single model.safetensors wins over an index, as in transformers: the index is left over.
    """
    single = path / "model.safetensors"
    if single.is_file():
        return {single: frozenset()}
    if (path / INDEX).is_file():
        shard_of = read_json(path / INDEX).get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of:
            raise CheckpointError(f"{path / INDEX} has no weight_map; download it again")
        shards: dict[str, set[str]] = {}
        for name, shard in shard_of.items():
            is_name = isinstance(shard, str) and Path(shard).name == shard and "\0" not in shard
            if not is_name or shard in ("", ".."):
                raise CheckpointError(
                    f"{path / INDEX}: {shortened(name)} is in {shortened(repr(shard))}, not a file name"
                )
            shards.setdefault(shard, set()).add(name)
        present = {file.name for file in path.iterdir() if file.name in shards and file.is_file()}
        absent = sorted(shards.keys() - present)
        if absent:
            raise CheckpointError(
                f"{path / shortened(absent[0])} is missing ({len(absent)} of {len(shards)} shards that "
                f"{INDEX} names); download the checkpoint again"
            )
        return {path / shard: frozenset(shards[shard]) for shard in sorted(shards)}
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        raise CheckpointError(
            f"{path} has {others[0]} but neither model.safetensors nor {INDEX}; download the "
            "missing files"
        )
    pickled = pickled_weights(path)
    if pickled is not None:
        raise CheckpointError(f"{path} {PICKLED_ONLY.format(pickled)}")
    raise CheckpointError(
        f"{path} has no weights: neither model.safetensors nor {INDEX}; download them, or name "
        "another directory"
    )
