"""`Family`: defaults of an architecture's `config.json`, and how the fields that are its own are read. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ramify.models.configs.dense_variant import LLAMA, ActivationName, DenseVariant
from ramify.models.configs.family_variants import Biases
from ramify.models.configs.fields import ConfigFields
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import KNOWN_SCALINGS

# How a family says which layers have a sliding window.
#   all: every layer, if there is a window
#   others: those of `layer_types`; without it
#     last: from layer `max_window_layers` on      alternate: every other layer below that
#     no_rope: layers without rope                 period: all but every `window_period`-th layer
WindowRule = Literal["none", "all", "last", "alternate", "no_rope", "period"]

ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of `FAMILIES`: defaults of an architecture, and how its own fields are read."""

    model_type: str
    variant: Callable[[ConfigFields, int], DenseVariant] = lambda _fields, _num_layers: LLAMA
    biases: Callable[[ConfigFields], Biases] = lambda _fields: Biases()
    experts: Callable[[ConfigFields, int], MoeConfig | None] = lambda _fields, _num_layers: None
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    windows: WindowRule = "none"
    sliding_window: int | None = None
    window_period: int = 0  # 0: every layer has a window
    has_period_field: bool = False  # `sliding_window_pattern` is the period
    has_window_switch: bool = False  # no windows unless `use_sliding_window`
    eps_field: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_field: str = "hidden_act"
    activation: str = "silu"
    activations: Mapping[str, ActivationName] = field(default_factory=ACTIVATIONS.copy)
    rope_theta: float = 10_000.0
    partial_rotary: float | None = None  # None: whole heads, whatever the configuration says
    rope: Mapping[str, Any] = field(default_factory=dict)  # its settings where there are none
    full_attention_rope: bool = True  # False: layers without a window have no rope
    local_rope_theta: float | None = None  # layers with a window have a rope of their own
    local_rope_field: str = "rope_local_base_freq"  # its base in transformers 4
    rope_scalings: tuple[str, ...] = KNOWN_SCALINGS
    # Context length of pre-training where the configuration has none beside its rotary settings; what
    # those say does not count then. None: what they say, else the model's own context length.
    original_max_len: int | None = None
    has_rope_alpha: bool = False  # `dynamic` scaling with `alpha` is another base
    intermediate_field: str = "intermediate_size"
    has_mtp_layers: bool = False  # checkpoints have multi-token-prediction layers, skipped
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] | None = None
    quant_methods: tuple[str, ...] = ()  # of `quantization_config`, widened at load
    is_latent: bool = False  # MLA: `MlaConfig.from_hf`
