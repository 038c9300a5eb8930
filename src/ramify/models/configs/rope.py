"""Rotary embedding settings of a `config.json`: base, scaling, rotated dimensions. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.fields import MAX_POSITIONS, ConfigFields, shown

# "none": a layer without rotary embedding (NoPE).
RopeScaling = Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope", "none"]
KNOWN_SCALINGS = tuple(kind for kind in get_args(RopeScaling) if kind != "none")
# They stretch the context of pre-training by `factor`. `llama3` and `longrope` do too, but their files
# give the stretched context as `max_position_embeddings`.
STRETCHING = ("linear", "dynamic", "yarn")
# A field of Gemma 3, whose `max_position_embeddings` are stretched already.
STRETCHED_FIELD = "rope_local_base_freq"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling of its frequencies.

    One set of frequencies serves all requests of an engine: frequencies that follow a request's length
    would make the keys of a shared prefix depend on the request. So `dynamic` is computed like
    `default` up to `original_max_len` tokens, and by `at_context` in an engine for more; `longrope`
    has one list of factors.
    """

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_max_len: int = 0  # llama3, yarn: context length of pre-training
    beta_fast: float = 32.0  # yarn: turns within original_max_len
    beta_slow: float = 1.0  # yarn: the same
    truncate: bool = True  # yarn: round the range of its ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin
    pair_factors: tuple[float, ...] = ()  # longrope: divide the frequency of each pair
    rotary_dim: int | None = None  # first dimensions of a head that are rotated; None: all

    def at_context(self, num_tokens: int, head_dim: int) -> RopeConfig:
        """The rotary embedding of an engine for contexts of `num_tokens`.

        `dynamic` (NTK-aware) gets the base that transformers computes for a prompt of that length.

        Raises:
            CheckpointError: that is no finite number.
        """
        if self.scaling != "dynamic" or num_tokens <= self.original_max_len:
            return self
        dim = self.rotary_dim or head_dim
        stretch = self.factor * num_tokens / self.original_max_len - (self.factor - 1)
        try:
            theta = self.theta * stretch ** (dim / (dim - 2))
        except (OverflowError, ZeroDivisionError):
            theta = math.inf
        if not math.isfinite(theta):
            raise CheckpointError(
                f"dynamic rotary settings with a factor of {self.factor:g} and {dim} rotated dimensions "
                f"have no finite base for {num_tokens:,} tokens; is config.json of this model?"
            )
        return replace(self, theta=theta, scaling="default")


NO_ROPE = RopeConfig(1.0, "none")


def rope_settings(fields: ConfigFields) -> dict[str, Any]:
    """The fields of `rope_scaling` (transformers 4) and `rope_parameters` (5), with `rope_type`.

    Raises:
        CheckpointError: either is not an object, or they contradict each other.
    """
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = _object(fields.config.get(name), fields.source, name)
        # Older files call it "type".
        if "type" in value:
            value = {"rope_type": value["type"], **value}
            del value["type"]
        if settings and value and value | settings != value:
            raise CheckpointError(
                f"{fields.source}: rope_scaling is {shown(settings)} and rope_parameters "
                f"{shown(value)}; "
                "which of them holds? leave one"
            )
        settings |= value
    return settings


def context_len(fields: ConfigFields, num_positions: int) -> int:
    """Tokens that a model can read: the context of pre-training times the factor of its scaling.

    Args:
        num_positions: `max_position_embeddings`, which may be either of the two. At least as many.

    Raises:
        CheckpointError: see `rope_settings`; a factor or a length is no number.
    """
    settings = rope_settings(fields)
    rope = ConfigFields(settings, f"{fields.source} (rope)")
    if settings.get("rope_type") not in STRETCHING or settings.get("factor") is None:
        return num_positions
    name = "original_max_position_embeddings"
    original = fields.config.get(name, settings.get(name))
    if original is None and STRETCHED_FIELD in fields.config:
        return num_positions
    before = (
        num_positions
        if original is None
        else ConfigFields({name: original}, rope.source).count(name)
    )
    return max(num_positions, int(min(before * rope.number("factor"), MAX_POSITIONS)))


def layer_type_settings(
    fields: ConfigFields, local_field: str, local_theta: float
) -> dict[str, dict[str, Any]]:
    """Rotary settings of `full_attention` and `sliding_attention` layers, of transformers 4 or 5.

    Args:
        local_field: holds the base of layers with a window in transformers 4.
        local_theta: that base where the field is absent.

    Raises:
        CheckpointError: see `rope_settings`.
    """
    given = rope_settings(fields)
    kinds = "full_attention", "sliding_attention"
    local = {"rope_theta": fields.number(local_field, local_theta)}
    if any(isinstance(given.get(kind), Mapping) for kind in kinds):
        full, sliding = (
            _object(given.get(kind), fields.source, f"{kind} of the rotary settings")
            for kind in kinds
        )
        return {"full_attention": full, "sliding_attention": local | sliding}
    return {"full_attention": given, "sliding_attention": local}


def _object(value: object, source: str, name: str) -> dict[str, Any]:
    """A JSON object, {} for null. CheckpointError for anything else."""
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{source}: {name} is {shown(value)}; it must be an object or null")
    return dict(value or {})


def read_rope(
    fields: ConfigFields,
    settings: Mapping[str, Any],
    *,
    head_dim: int,
    max_model_len: int,
    default_theta: float = 10_000.0,
    default_partial: float | None = None,
    default_original_len: int | None = None,
    scalings: tuple[str, ...] = KNOWN_SCALINGS,
    has_alpha: bool = False,
) -> RopeConfig:
    """`RopeConfig` of some rotary settings, completed by fields beside them.

    Args:
        default_partial: rotated share of a head where the configuration does not say; None: the
            family rotates whole heads, whatever it says.
        default_original_len: context length of pre-training where the configuration has none beside
            these settings; None: theirs, else `max_model_len`.
        scalings: that the family knows.
        has_alpha: the family reads `alpha` of `dynamic`.

    Raises:
        UnsupportedModelError: the scaling or the rotated share is not supported.
        CheckpointError: a value is missing or impossible.
    """
    config, source = fields.config, fields.source
    settings = dict(settings)
    nested = [name for name, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"{source}: {nested[0]} of the rotary settings is an object; settings per layer type are "
            "not supported for this family"
        )
    for name in ("rope_theta", "partial_rotary_factor"):
        if settings.get(name) is None and config.get(name) is not None:
            settings[name] = config[name]
    original_field = "original_max_position_embeddings"
    if config.get(original_field, default_original_len) is not None:
        settings[original_field] = config.get(original_field, default_original_len)
    rope = ConfigFields(settings, f"{source} (rope)")
    kind: Any = settings.get("rope_type")
    kind = "default" if kind is None else kind
    # Early Phi-3 files.
    if kind == "su" or (kind == "yarn" and "yarn" not in scalings):
        kind = "longrope"
    if kind not in scalings:
        raise UnsupportedModelError(
            f"{rope.source}: rope_type is {shown(kind)}; supported are {', '.join(scalings)}"
        )
    rotary_dim = _rotary_dim(rope, head_dim, default_partial)
    theta = rope.number("rope_theta", default_theta)
    alpha = rope.factor("alpha") if kind == "dynamic" and has_alpha else None
    if alpha is not None:
        # NTK-aware with a fixed alpha (Hunyuan): another base, whatever the length.
        dim = rotary_dim or head_dim
        return RopeConfig(theta * alpha ** (dim / (dim - 2)), rotary_dim=rotary_dim)
    original = rope.count(original_field, max_model_len)
    if kind == "longrope":
        return _longrope(rope, theta, original, rotary_dim or head_dim, max_model_len)
    is_llama3, is_yarn = kind == "llama3", kind == "yarn"
    made = RopeConfig(
        theta=theta,
        scaling=kind,
        factor=1.0 if kind == "default" else rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor") if is_llama3 else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if is_llama3 else 1.0,
        original_max_len=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=yarn_attention_factor(rope) if is_yarn else 1.0,
        rotary_dim=rotary_dim,
    )
    if is_yarn:
        yarn_ramp(made, rotary_dim or head_dim)
    return made


def _rotary_dim(rope: ConfigFields, head_dim: int, default_partial: float | None) -> int | None:
    """Rotated dimensions of a head; None: all."""
    partial = rope.number("partial_rotary_factor", default_partial or 1.0)
    if default_partial is None and partial != 1.0:
        raise UnsupportedModelError(
            f"{rope.source}: partial_rotary_factor is {partial}; this family has only 1"
        )
    rotary_dim = int(head_dim * min(partial, 2.0))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(
            f"{rope.source}: partial_rotary_factor {partial} of head_dim {head_dim} is "
            f"{rotary_dim} dimensions; rotary needs pairs"
        )
    return None if rotary_dim == head_dim else rotary_dim


def _longrope(
    rope: ConfigFields, theta: float, original: int, rotary_dim: int, max_model_len: int
) -> RopeConfig:
    """LongRoPE (Ding et al., 2024): the long factors if the model's context is the long one."""
    name = "long_factor" if max_model_len > original else "short_factor"
    factors = rope.config.get(name)
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise CheckpointError(
            f"{rope.source}: {name} must be a list of {rotary_dim // 2} numbers, one for each pair "
            f"of rotated dimensions; it is {shown(factors)}"
        )
    if any(isinstance(f, bool) or not isinstance(f, int | float) or not f > 0 for f in factors):
        raise CheckpointError(f"{rope.source}: {name} has numbers that are not above 0")
    factor = rope.number("factor", max_model_len / original)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta=theta,
        scaling="longrope",
        factor=factor,
        original_max_len=original,
        attention_factor=rope.number("attention_factor", attention_factor),
        pair_factors=tuple(float(value) for value in factors),
        rotary_dim=rotary_dim,
    )


def yarn_ramp(rope: RopeConfig, dim: int) -> tuple[float, float]:
    """YaRN: the dimensions that make `beta_fast` and `beta_slow` turns within `original_max_len`.

    Raises:
        ArithmeticError, ValueError: the settings have no such dimensions.
    """

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_len / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, dim - 1)


def yarn_attention_factor(rope: ConfigFields) -> float:
    """YaRN's factor of cos and sin (Peng et al., 2023), with DeepSeek's `mscale` fields."""
    if rope.config.get("attention_factor") is not None:
        return rope.number("attention_factor")
    factor = rope.number("factor")
    mscale, all_dim = rope.factor("mscale"), rope.factor("mscale_all_dim")
    if mscale is not None and all_dim is not None:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 without scaling."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
