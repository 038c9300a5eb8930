"""A source whose weights are counted as they are read."""

from __future__ import annotations

from ramify.models.checkpoint.changed_weights import ChangedWeights
from ramify.models.checkpoint.loaded_weights import LoadedWeight
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.ops.quantized import Weight


def counted(source: WeightSource) -> tuple[WeightSource, dict[str, LoadedWeight]]:
    """The same source, and a dictionary that gets each weight that is read from it, by name."""
    loaded: dict[str, LoadedWeight] = {}

    def count(name: str, weight: Weight) -> Weight:
        loaded[name] = LoadedWeight.of(weight, source.kind(name))
        return weight

    return ChangedWeights(source, count), loaded
