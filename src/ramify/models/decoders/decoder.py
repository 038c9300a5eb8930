"""`Decoder`: token embedding, decoder layers and LM head, whatever the family and the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ramify.attention.exactness import Exactness
from ramify.attention.paged import PagedBackend
from ramify.kv.pool import KVPool
from ramify.models.checkpoint.loaded_weights import LoadedWeight
from ramify.models.configs.dense_variant import NormKind
from ramify.models.configs.model_config import ModelConfig
from ramify.models.ops.protocol import DecoderLayer, Embedding, ForwardStep, LmHead, Norm, Ops


def norm_of(
    config: ModelConfig,
    layer: int | None,
    name: str | None,
    *,
    kind: NormKind | None = None,
    offset: float | None = None,
) -> Norm | None:
    """The norm of that name in a layer, or behind the layers; None without a name.

    Args:
        kind, offset: None: those of the layers' norms.
    """
    if name is None:
        return None
    variant, prefix = config.variant, "model." if layer is None else f"model.layers.{layer}."
    return Norm(
        prefix + name,
        config.rms_norm_eps,
        variant.norm if kind is None else kind,
        variant.norm_offset if offset is None else offset,
    )


def bind_embedding(ops: Ops, config: ModelConfig) -> Embedding:
    """The rows of `model.embed_tokens`, scaled."""
    return ops.embedding("model.embed_tokens", scale=config.variant.embedding_scale)


def bind_lm_head(ops: Ops, config: ModelConfig) -> LmHead:
    """`lm_head`, or tied `model.embed_tokens`, behind the norm `model.norm`."""
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    norm, variant = norm_of(config, None, "norm"), config.variant
    assert norm is not None
    return ops.lm_head(name, norm=norm, scale=variant.logit_scale, soft_cap=variant.logit_soft_cap)


@dataclass(frozen=True, slots=True)
class DecoderBinding:
    """Binds a family's operations: a layer by its number, the embedding, the LM head."""

    layer: Callable[[Ops, ModelConfig, int], DecoderLayer]
    embedding: Callable[[Ops, ModelConfig], Embedding] = bind_embedding
    lm_head: Callable[[Ops, ModelConfig], LmHead] = bind_lm_head


class CausalDecoder(Protocol):
    """The interface of a model to runner and engine; `Decoder` and `HfDecoder` have it."""

    config: ModelConfig
    loaded: Mapping[str, LoadedWeight]  # what each weight takes, by name; empty: not counted

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and arithmetic."""
        ...

    @property
    def row_multiple(self) -> int:
        """Pad a step to a multiple of this many rows, or its bits are not exact."""
        ...

    @property
    def reason_not_captured(self) -> str | None:
        """None, or why no graph can hold a step."""
        ...

    def exactness(self) -> list[Exactness]:
        """The implementation of each distinct operation, shape and dtype, and why it was chosen."""
        ...

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """Compile for steps over this backend and pool now, not in the first step."""
        ...

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Tokens [T] int64 -> hidden rows [T, hidden_size], which `logits` takes."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [R, hidden_size] -> [R, vocab_size] float32."""
        ...

    def embeddings(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [R, hidden_size] -> the same behind the final norm, float32."""
        ...


class Decoder:
    """A decoder-only transformer of one family, bound to one device's operations.

    The caller owns the K/V cache and attention, passes both in the `ForwardStep`, and calls under
    `torch.inference_mode`.

    Args:
        ops: holds every weight of `config.tensor_shapes()`.
        loaded: gets what each weight takes, by name, as `ops` reads it.
        on_layer: called after each layer is bound, for a progress bar.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        binding: DecoderBinding,
        *,
        loaded: Mapping[str, LoadedWeight] | None = None,
        on_layer: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.ops = config, ops
        self.loaded = {} if loaded is None else loaded
        self.embedding = binding.embedding(ops, config)
        layers = []
        for number in range(config.num_layers):
            layers.append(binding.layer(ops, config, number))
            if on_layer is not None:
                on_layer()
        self.layers = ops.stack(layers)
        self.lm_head = binding.lm_head(ops, config)
        final_norm = norm_of(config, None, "norm")
        assert final_norm is not None
        self.final_norm = ops.norm(final_norm)
        ops.finish()

    @property
    def dtype(self) -> torch.dtype:
        """See `CausalDecoder`."""
        return self.ops.dtype

    @property
    def row_multiple(self) -> int:
        """See `CausalDecoder`."""
        return self.ops.row_multiple

    @property
    def reason_not_captured(self) -> str | None:
        """See `CausalDecoder`."""
        return self.ops.reason_not_captured

    def exactness(self) -> list[Exactness]:
        """See `CausalDecoder`."""
        return self.ops.exactness()

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """See `CausalDecoder`."""
        self.layers.warm_up(backend, pool)

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Run all layers; returns the hidden rows before the final norm, which `logits` applies.

        Args:
            token_ids: [T] int64, each below vocab_size.
            step: positions below max_model_len; its attention is called once per layer, in order,
                unless the device does both in one.

        Returns:
            [T, hidden_size] in the model's dtype; for rows outside `step.output_rows` see `LayerStack`.
        """
        return self.layers(self.embedding(token_ids), self.ops.begin(step))

    def logits(self, hidden: Tensor) -> Tensor:
        """lm_head(norm(hidden)): rows of `forward` [R, hidden_size] -> [R, vocab_size] float32."""
        return self.lm_head(hidden)

    def embeddings(self, hidden: Tensor) -> Tensor:
        """norm(hidden): rows of `forward` [R, hidden_size] -> the same in float32."""
        return self.final_norm(hidden).float()
