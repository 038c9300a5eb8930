"""Sliding windows in `config.json`: how long they are, and which layers have full attention. No torch."""

from __future__ import annotations

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.family import Family
from ramify.models.configs.fields import ConfigFields, shown

LAYER_TYPES = ("full_attention", "sliding_attention")


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
