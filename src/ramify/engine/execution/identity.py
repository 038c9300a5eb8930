"""Computes the `EngineIdentity` of an engine that is built from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch

from ramify.attention.exactness import Exactness, cache_folder, machine_parts
from ramify.config import ResolvedConfig
from ramify.engine.execution.content_digest import DigestStore, checkpoint_files, content_digest
from ramify.engine.identity import EngineIdentity
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import CausalDecoder


def identity_of(
    path: Path,
    config: ResolvedConfig,
    decoder: CausalDecoder,
    pool: KVPool,
    exactness: Sequence[Exactness],
    *,
    device: str,
    ops: str,
    attention: str,
) -> EngineIdentity:
    """The identity of an engine. Reads all bytes of its checkpoint, unless the user's store has their digest.

    Args:
        exactness: the strategy of each operation and of attention.
        device: its name.
        ops, attention: names of the implementations.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    requested, num_ranks = config.requested, config.requested.ranks.tensor_parallel_size
    folder = cache_folder()
    store = DigestStore(None if folder is None else folder / "checkpoint-digests.json")
    strategies = sorted(f"{op.operation} {op.shape} {op.dtype} {op.strategy}" for op in exactness)
    kinds = sorted(f"{name} {held.kind} {held.dtype}" for name, held in decoder.loaded.items())
    return EngineIdentity(
        weights=content_digest(checkpoint_files(path), store),
        weight_types=_digest([str(decoder.dtype), requested.model.quantize, *kinds]),
        model=_digest([canonical(decoder.config)]),
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        kv_layout=canonical(pool.layout),
        page_size=config.page_size,
        exact=requested.attention.exact,
        arithmetic=" | ".join(
            [
                *([] if device == "cpu" else [f"device {device}"]),
                *([] if num_ranks == 1 else [f"ranks {num_ranks}"]),
                f"ops {ops}",
                f"attention {attention}",
                f"activations {requested.model.activations}",
                f"kernels {_kernel_arithmetic(ops, attention)}",
                *machine_parts(),
                _digest(strategies),
            ]
        ),
        threads=torch.get_num_threads(),
        sampling=requested.speculative.speculative_sampling,
    )


def _kernel_arithmetic(ops: str, attention: str) -> str:
    if "cpu" not in (ops, attention):
        return "none"
    from ramify.kernels.cpu.tile_choice import kernel_arithmetic

    return kernel_arithmetic()


def canonical(value: object) -> str:
    """A dataclass of plain values as a text that is the same in every process; sets are sorted."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = [f"{field.name}={canonical(getattr(value, field.name))}" for field in fields(value)]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, Mapping):
        entries = sorted(f"{canonical(key)}: {canonical(entry)}" for key, entry in value.items())
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(canonical, value))})"
    return repr(value)


def _digest(lines: list[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
