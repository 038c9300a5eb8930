"""Weights changed as they are read: rounded to int8 or int4, or dequantised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from ramify.errors import CheckpointError, ConfigError
from ramify.models.checkpoint.packed_layers import FLOAT_DTYPES
from ramify.models.checkpoint.tensor_names import EMBEDDING, HEAD, LINEARS
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.ops.quantized import QuantizedWeight, Weight, as_tensor
from ramify.models.ops.weight_part import WeightPart
from ramify.models.ops.weight_rounding import INT4_GROUP, quantize_weight

INT8_GROUP = 64
# bits and group_size of `quantize_weight`
FORMATS: dict[str, tuple[Literal[4, 8], int]] = {"int8": (8, INT8_GROUP), "int4": (4, INT4_GROUP)}
QUANTIZE = ("off", *FORMATS, "widen")
# bits of the integers that rows are rounded to beside quantised weights
ROW_BITS: dict[str, Literal[8, 16]] = {"int16": 16, "int8": 8}
# Not a linear layer: it is used by head.
BY_HEAD = ".kv_b_proj.weight"


class ChangedWeights(WeightSource):
    """Another source, with each weight changed as it is read.

    Args:
        change: (name, weight) -> the weight of the same shape.
        kind_of: (name, kind) -> the kind, with what becomes of it.
    """

    def __init__(
        self,
        source: WeightSource,
        change: Callable[[str, Weight], Weight],
        kind_of: Callable[[str, str], str] = lambda _, kind: kind,
    ) -> None:
        self._source, self._change, self._kind_of = source, change, kind_of

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __getitem__(self, name: str) -> Weight:
        return self._change(name, self._source[name])

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """The part of the source, changed: groups that are rounded together begin with it."""
        return self._change(name, self._source.read_part(name, part))

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._source.shape(name)

    def num_bytes(self, name: str) -> int:
        """See `WeightSource`."""
        return self._source.num_bytes(name)

    def kind(self, name: str) -> str:
        """See `WeightSource`."""
        return self._kind_of(name, self._source.kind(name))

    @property
    def widened(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return self._source.widened


def is_rounded(name: str, config: ModelConfig) -> bool:
    """Whether a weight is that of a linear layer, or the embedding or LM head."""
    if name in (EMBEDDING, HEAD):
        return True
    is_linear = name.endswith(LINEARS) and not name.endswith(BY_HEAD)
    return is_linear and not config.is_float32(name)


def change_weights(
    source: WeightSource, config: ModelConfig, quantize: str, checkpoint: str
) -> WeightSource:
    """A source as the option `quantize` says.

    Args:
        quantize: of `QUANTIZE`. "off": as it is. "int8", "int4": linear layers are rounded to that, embedding and LM
            head to int8. "widen": dequantised.
        checkpoint: its name, for errors.

    Raises:
        ConfigError: the checkpoint is quantised already.
    """
    if quantize == "off":
        return source
    if quantize == "widen":
        return ChangedWeights(source, lambda _, weight: as_tensor(weight))
    quantized = {source.kind(name) for name in source} - {*FLOAT_DTYPES}
    if quantized:
        raise ConfigError(
            f"quantize={quantize!r}, but {checkpoint} is quantised already ({', '.join(sorted(quantized))}); "
            "leave it out, or take the checkpoint in full precision"
        )

    def target(name: str) -> str | None:
        if not is_rounded(name, config):
            return None
        return "int8" if name in (EMBEDDING, HEAD) else quantize

    def rounded(name: str, weight: Weight) -> Weight:
        form = target(name)
        if form is None:
            return weight
        codes = quantize_weight(as_tensor(weight), *FORMATS[form])
        # in numpy, which starts no threads
        if not np.isfinite(codes.scales.numpy()).all():
            raise CheckpointError(
                f"{checkpoint}: {name} has an infinity or a NaN, which {form} cannot hold; leave out "
                "quantize, or download the checkpoint again"
            )
        return codes

    def kind_of(name: str, kind: str) -> str:
        form = target(name)
        return kind if form is None else f"{kind} to {form}, groups of {FORMATS[form][1]}"

    return ChangedWeights(source, rounded, kind_of)


def with_activations(
    source: WeightSource, activations: str, quantize: str, checkpoint: str
) -> WeightSource:
    """A source whose quantised weights meet rows of these integers.

    Args:
        source: with `quantize` applied.
        activations: a key of `ROW_BITS`.
        checkpoint: its name, for errors.

    Raises:
        ConfigError: no weight is quantised, and `activations` is not the default.
    """
    bits = ROW_BITS[activations]
    if bits == 16:
        return source
    if quantize == "widen":
        raise ConfigError(
            f"activations={activations!r} with quantize='widen': dequantised weights meet no integers; leave "
            "one of them out"
        )
    if all(source.kind(name) in FLOAT_DTYPES for name in source):
        raise ConfigError(
            f"activations={activations!r} concerns quantised weights, and {checkpoint} has none; add "
            "quantize='int8' or 'int4', or leave it out"
        )

    def narrowed(_: str, weight: Weight) -> Weight:
        if not isinstance(weight, QuantizedWeight):
            return weight
        return replace(weight, format=replace(weight.format, row_bits=bits))

    return ChangedWeights(source, narrowed)
