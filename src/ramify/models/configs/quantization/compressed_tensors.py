"""The rules of a `quantization_config` of compressed-tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.fields import ConfigFields, shown
from ramify.models.configs.quantization.module_pattern import compile_pattern
from ramify.models.configs.quantization.rules import Rule, texts
from ramify.models.configs.quantization.scheme import Packing, Scheme

LINEAR = "Linear"
PATTERN_MARK = "re:"
# The format of each type of weight where the file says "naive-quantized".
NAIVE: dict[object, Packing] = {"int": "int-quantized", "float": "float-quantized"}
FORMATS: dict[object, Packing] = {
    "pack-quantized": "pack-quantized",
    "int-quantized": "int-quantized",
    "float-quantized": "float-quantized",
}
STRATEGIES = ("tensor", "channel", "group", "block")


def compressed_tensors_rules(fields: ConfigFields) -> tuple[Rule, ...]:
    """`ignore` first; then each group's targets: whole names, patterns, classes of modules."""
    config = fields.config
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise _unsupported(fields, "sparsity_config.format", sparsity["format"], "dense")
    if config.get("transform_config"):
        raise _unsupported(fields, "transform_config", config["transform_config"], "none")
    rules = [_rule(target, None, fields) for target in texts(fields, "ignore")]
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError(
            f"{fields.source}: config_groups is {shown(groups)}; it must be an object with a group"
        )
    named, by_pattern, by_class = list[Rule](), list[Rule](), list[Rule]()
    for key, settings in groups.items():
        source = f"{fields.source}: config_groups[{shown(key)}]"
        if not isinstance(settings, Mapping):
            raise CheckpointError(f"{source} is {shown(settings)}; it must be an object")
        group = ConfigFields(settings, source)
        scheme = _scheme(group, settings.get("format") or config.get("format"))
        for target in texts(group, "targets"):
            kind = by_pattern if target.startswith(PATTERN_MARK) else named
            (by_class if target == LINEAR else kind).append(_rule(target, scheme, group))
    return (*rules, *named, *by_pattern, *by_class)


def _rule(target: str, scheme: Scheme | None, fields: ConfigFields) -> Rule:
    if target == LINEAR:
        return Rule(scheme)
    if target.startswith(PATTERN_MARK):
        return Rule(
            scheme, pattern=compile_pattern(target.removeprefix(PATTERN_MARK), fields.source)
        )
    return Rule(scheme, name=target)


def _scheme(group: ConfigFields, layout: object) -> Scheme:
    weights: Any = group.config.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{group.source}: weights is {shown(weights)}; it must be an object")
    fields = ConfigFields(weights, f"{group.source}: weights")
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    naive = isinstance(kind, str) and (layout is None or layout == "naive-quantized")
    packing = (NAIVE if naive else FORMATS).get(kind if naive else _text(layout))
    if packing is None:
        raise _unsupported(group, "format", layout, ", ".join(map(str, FORMATS)))
    is_float = packing == "float-quantized"
    if kind != ("float" if is_float else "int"):
        raise _unsupported(
            fields, f"type with format {packing}", kind, "float" if is_float else "int"
        )
    if type(bits) is not int or bits not in ((8,) if is_float else (4, 8)):
        raise _unsupported(fields, "num_bits", bits, "8" if is_float else "4, 8")
    strategy, block = weights.get("strategy"), weights.get("block_structure")
    if strategy is None:
        strategy = "group" if weights.get("group_size") not in (None, -1) else "tensor"
    if strategy not in STRATEGIES or (strategy == "block" and not is_float):
        raise _unsupported(fields, "strategy", strategy, ", ".join(STRATEGIES))
    symmetric = fields.flag("symmetric", default=True)
    if not symmetric and (is_float or strategy == "tensor"):
        raise _unsupported(fields, "symmetric", symmetric, f"true with {packing} and {strategy}")
    size = {"tensor": 0, "channel": -1, "block": -1}.get(strategy)
    return Scheme(
        packing,
        4 if bits == 4 else 8,
        fields.count("group_size") if size is None else size,
        symmetric=symmetric,
        block=_block(fields, block) if strategy == "block" else None,
    )


def _text(layout: object) -> object:
    """The layout if it can be a key, else None."""
    return layout if isinstance(layout, str) else None


def _block(fields: ConfigFields, block: object) -> tuple[int, int]:
    if isinstance(block, list) and len(block) == 2:
        high, wide = block
        if type(high) is int and type(wide) is int and high > 0 and wide > 0:
            return high, wide
    raise CheckpointError(
        f"{fields.source}: block_structure is {shown(block)}; it must be two integers >= 1"
    )


def _unsupported(
    fields: ConfigFields, name: str, value: object, known: str
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{fields.source}: {name} {shown(value)} is not supported; supported: {known}. Use the original "
        "checkpoint, or one quantised so"
    )
