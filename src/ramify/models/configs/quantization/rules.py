"""Which modules a statement of a quantisation is about. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.errors import CheckpointError
from ramify.models.configs.fields import ConfigFields, shown
from ramify.models.configs.quantization.module_pattern import ModulePattern
from ramify.models.configs.quantization.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Rule:
    """The scheme of some modules, None for full precision: of all, unless a field below limits them.

    Args:
        name: the module's whole name.
        part: components of the module's name that follow each other: "lm_head", "mlp.gate".
        pattern: matches from the start of the module's name.
    """

    scheme: Scheme | None
    name: str | None = None
    part: str | None = None
    pattern: ModulePattern | None = None

    def matches(self, module: str) -> bool:
        """Whether the rule is about this module."""
        if self.name is not None and module != self.name:
            return False
        if self.part is not None and f".{self.part}." not in f".{module}.":
            return False
        return self.pattern is None or self.pattern.matches_start(module)


def texts(fields: ConfigFields, name: str) -> list[str]:
    """A list of strings; [] for null and where it is absent. CheckpointError for anything else."""
    items = fields.items(name) or []
    if not all(isinstance(item, str) for item in items):
        raise CheckpointError(f"{fields.source}: {name} is {shown(items)}; it must list strings")
    return items
