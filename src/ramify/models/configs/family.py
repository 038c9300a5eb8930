"""`Family`: defaults of an architecture's `config.json`; fields that many have: biases, windows. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.dense_variant import LLAMA, ActivationName, DenseVariant
from ramify.models.configs.fields import ConfigFields, shown
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.rope import KNOWN_SCALINGS

# How a family says which layers have a sliding window.
#   all: every layer, if there is a window
#   others: those of `layer_types`; without it
#     last: from layer `max_window_layers` on      alternate: every other layer below that
#     no_rope: layers without rope                 period: all but every `window_period`-th layer
WindowRule = Literal["none", "all", "last", "alternate", "no_rope", "period"]

LAYER_TYPES = ("full_attention", "sliding_attention")

ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears of a layer have a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


def attention_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`: on q, k, v and o."""
    bias = fields.flag("attention_bias", False)
    return Biases(qkv=bias, o=bias)


def llama_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`, and `mlp_bias` on the MLP."""
    bias = fields.flag("attention_bias", False)
    return Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", False))


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
    is_latent: bool = False  # MLA: `MlaConfig.from_hf`


def read_windows(
    fields: ConfigFields, family: Family, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """The sliding window in tokens, and the layers that have full attention nevertheless.

    Raises:
        UnsupportedModelError: the configuration says which layers have a window in a way that the
            family does not know.
        CheckpointError: a value is impossible, or contradicts another.
    """
    config, rule = fields.config, family.windows
    if rule == "none" or (
        family.has_window_switch and not fields.flag("use_sliding_window", False)
    ):
        return None, frozenset()
    kinds = None
    if rule != "all":
        kinds = fields.layer_kinds("layer_types", num_layers, LAYER_TYPES)
    if config.get("sliding_window", family.sliding_window) is None:
        if kinds is not None and "sliding_attention" in kinds:
            raise CheckpointError(
                f"{fields.source}: layer_types has layers with sliding_attention, but "
                "sliding_window is null; it must be an integer >= 1"
            )
        return None, frozenset()
    window = fields.count("sliding_window", family.sliding_window)
    if rule == "all" and config.get("layer_types"):
        raise UnsupportedModelError(
            f"{fields.source}: layer_types is not a setting of {family.model_type} models"
        )
    if kinds is not None:
        return window, frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return window, _full_attention_layers(fields, family, num_layers)


def _full_attention_layers(fields: ConfigFields, family: Family, num_layers: int) -> frozenset[int]:
    """Layers without a window, where the configuration has no `layer_types`."""
    layers = range(num_layers)
    if family.windows == "all":
        return frozenset()
    if family.windows == "no_rope":
        return frozenset(layers) - family.variant(fields, num_layers).layers_without_rope
    if family.windows in ("last", "alternate"):
        limit = fields.config.get("max_window_layers", 28)
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise CheckpointError(
                f"{fields.source}: max_window_layers is {shown(limit)}; it must be an integer"
            )
        if family.windows == "last":
            return frozenset(layer for layer in layers if layer < limit)
        return frozenset(layer for layer in layers if layer % 2 or layer >= limit)
    period = family.window_period
    if family.has_period_field:
        period = fields.config.get("sliding_window_pattern", period)
        if isinstance(period, bool) or not isinstance(period, int) or period < 1:
            raise UnsupportedModelError(
                f"{fields.source}: sliding_window_pattern is {shown(period)}; it must be an integer >= 1, "
                "or give layer_types"
            )
    return frozenset(layer for layer in layers if period and (layer + 1) % period == 0)
