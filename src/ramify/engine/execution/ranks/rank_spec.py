"""`RankSpec`: everything that makes a rank of tensor parallelism, as it is sent to its process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ramify.attention.backend import select_backend
from ramify.config import ResolvedConfig
from ramify.engine.execution.ranks.rank_runner import RankRunner
from ramify.kv.pool import KVPool
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.sharding import rank_config
from ramify.models.decoders.decoder import CausalDecoder
from ramify.models.kv_cache_spec import (
    attention_spec,
    build_attention,
    kv_layout,
    resolve_kv_dtype,
)
from ramify.models.loader import load_decoder, read_config, resolve_dtype
from ramify.models.ops.registry import OpsFactory, select_ops
from ramify.models.ops.sharded.rank_group import RankGroup
from ramify.models.ops.sharded.sharded_ops import ShardedOps


@dataclass(frozen=True, slots=True)
class RankSpec:
    """A rank and the engine that it is of.

    Args:
        path: of the checkpoint.
        ops, attention: names of the implementations that rank 0 has chosen.
        folder: where the ranks meet.
        threads: of this process.
        timeout_s: of a sum over ranks.
    """

    rank: int
    size: int
    path: Path
    config: ResolvedConfig
    device: str
    ops: str
    attention: str
    folder: Path
    threads: int
    timeout_s: float

    def load(self, group: RankGroup) -> RankRunner:
        """Load the rank's part of the model; makes its K/V pool and its attention."""
        requested = self.config.requested
        model, device = read_config(self.path), torch.device(self.device)
        dtype = resolve_dtype(requested.model.dtype, model)
        kv_dtype = resolve_kv_dtype(requested.cache.kv_dtype, dtype)
        own = rank_config(model, self.size)
        spec = attention_spec(
            own,
            page_size=self.config.page_size,
            dtype=dtype,
            exact=requested.attention.exact,
            kv_dtype=kv_dtype,
        )
        decoder: CausalDecoder = load_decoder(
            self.path,
            dtype=requested.model.dtype,
            exact=requested.attention.exact,
            ops=sharded(select_ops(self.ops, dtype, device).factory, model, group),
            quantize=requested.model.quantize,
            activations=requested.model.activations,
            max_model_len=self.config.max_model_len,
            device=device,
        )
        pool = KVPool(
            kv_layout(own),
            self.config.num_pages,
            self.config.page_size,
            dtype=kv_dtype,
            device=device,
        )
        backend = select_backend(self.attention, spec, device).backend
        return RankRunner(decoder, pool, build_attention(own, spec, backend, device), group)


def sharded(inner: OpsFactory, config: ModelConfig, group: RankGroup) -> OpsFactory:
    """Makes the operations of a rank over those of its device."""
    return partial(ShardedOps, config=config, group=group, inner=inner)
