"""`RankWeights`: the weights of a checkpoint, of which a rank of tensor parallelism reads its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ramify.errors import ConfigError
from ramify.models.ops.quantized import Weight
from ramify.models.ops.weight_part import WeightPart, read_part


class RankWeights(Mapping[str, Weight]):
    """Weights by name; a part, or none, of those that were divided."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._parts: dict[str, WeightPart] = {}
        self._hidden: set[str] = set()
        self._aliases: dict[str, str] = {}

    def divide(self, name: str, part: WeightPart) -> None:
        """Of this weight, if there is one, only that part is there from now on."""
        self._parts[name] = part

    def hide(self, name: str) -> Weight | None:
        """Return this weight, which is not there from now on; None if there is none."""
        if name not in self:
            return None
        weight = self[name]
        self._hidden.add(name)
        return weight

    def rename(self, alias: str, name: str) -> None:
        """`alias` names the weight `name` from now on."""
        self._aliases[alias] = name

    def __contains__(self, name: object) -> bool:
        return name not in self._hidden and self._aliases.get(str(name), name) in self._weights

    def __getitem__(self, name: str) -> Weight:
        """Read a weight, or its part.

        Raises:
            ConfigError: it is quantised, and the part is no whole groups of its columns.
        """
        if name in self._hidden:
            raise KeyError(name)
        part, stored = self._parts.get(name), self._aliases.get(name, name)
        if part is None:
            return self._weights[stored]
        try:
            return read_part(self._weights, stored, part)
        except ValueError as error:
            raise ConfigError(
                f"{stored} is quantised, and ranks cannot share its groups: {error}; use another "
                "tensor_parallel_size, or quantize='widen'"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if name not in self._hidden)

    def __len__(self) -> int:
        return len(self._weights) - len(self._hidden)
