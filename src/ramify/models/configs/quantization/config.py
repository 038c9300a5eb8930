"""What a checkpoint says of its quantisation: a scheme for each module, or none. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.fields import ConfigFields, read_optional_json, shown
from ramify.models.configs.quantization.compressed_tensors import compressed_tensors_rules
from ramify.models.configs.quantization.module_pattern import compile_pattern
from ramify.models.configs.quantization.rules import Rule, texts
from ramify.models.configs.quantization.scheme import Scheme

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "bitsandbytes", "mxfp4")
KEYS = ("quantization_config", "compression_config")
# Files of older tools beside config.json, and their quant_method.
FILES_BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
MAX_PATTERNS = 256
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
MAX_GROUP = 128


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The quantisation of a checkpoint: the first rule that names a module says how it is read."""

    method: str
    rules: tuple[Rule, ...]

    def scheme(self, module: str) -> Scheme | None:
        """How a linear layer is stored; None: in full precision."""
        return next((rule.scheme for rule in self.rules if rule.matches(module)), None)


def read_quantization(config: Mapping[str, Any], source: str) -> QuantizationConfig | None:
    """The quantisation that a configuration states; None if it states none.

    Args:
        config: the parsed `config.json`: `quantization_config` or `compression_config` in it, or in its
            `text_config`.
        source: name of the file, for messages.

    Raises:
        UnsupportedModelError: the method, or a setting of it, is not supported; names it.
        CheckpointError: a setting has a value of another type.
    """
    settings = quantization_settings(config)
    if settings is None or settings == {}:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(
            f"{source}: quantization_config is {shown(settings)}; it must be an object"
        )
    fields = ConfigFields(settings, f"{source}: quantization_config")
    method = settings.get("quant_method")
    if method not in METHODS:
        raise _unsupported(fields, f"quant_method {shown(method)}", ", ".join(METHODS))
    rules = _READERS[str(method)](fields)
    num_patterns = sum(rule.pattern is not None for rule in rules)
    if num_patterns > MAX_PATTERNS:
        raise CheckpointError(
            f"{fields.source}: it has {num_patterns} regular expressions, above {MAX_PATTERNS}; name the "
            "modules instead"
        )
    return QuantizationConfig(str(method), rules)


def with_settings_beside(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """A `config.json` with the `quantization_config` of the file beside it that older tools wrote, if it has none.

    Args:
        path: of the checkpoint's directory.
    """
    if quantization_settings(fields) is not None:
        return fields
    for name, method in FILES_BESIDE.items():
        settings = read_optional_json(path / name)
        if settings:
            return fields | {KEYS[0]: {"quant_method": method, **settings}}
    return fields


def quantization_settings(config: Mapping[str, Any]) -> object:
    """What a `config.json`, or the `text_config` in it, says of quantisation, unchecked; None: nothing."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, Mapping) else {}):
        for key in KEYS:
            if holder.get(key) is not None:
                settings = holder[key]
                if key == "compression_config" and isinstance(settings, Mapping):
                    return {"quant_method": "compressed-tensors", **settings}
                return settings
    return None


def _gptq(fields: ConfigFields) -> tuple[Rule, ...]:
    config = fields.config
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if not isinstance(layout, str) or layout not in GPTQ_FORMATS or config.get("is_marlin_format"):
        layout = "marlin" if config.get("is_marlin_format") else layout
        raise _unsupported(fields, f"checkpoint_format {shown(layout)}", ", ".join(GPTQ_FORMATS))
    if config.get("pack_dtype") not in (None, "int32"):
        raise _unsupported(fields, f"pack_dtype {shown(config['pack_dtype'])}", "int32")
    base = Scheme("gptq", _bits(fields), _group_size(fields), zero_offset=GPTQ_FORMATS[layout])
    base = replace(base, symmetric=fields.flag("sym", default=True))
    rules = list[Rule]()
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"{fields.source}: dynamic is {shown(dynamic)}; it must be an object")
    for key, changes in dynamic.items():
        pattern = compile_pattern(
            key.removeprefix("+:").removeprefix("-:"), f"{fields.source}: dynamic"
        )
        if key.startswith("-:"):
            rules.append(Rule(None, pattern=pattern))
            continue
        if not isinstance(changes, Mapping):
            raise CheckpointError(
                f"{fields.source}: dynamic[{shown(key)}] is {shown(changes)}; it must be an object"
            )
        own = ConfigFields({**config, **changes}, f"{fields.source}: dynamic[{shown(key)}]")
        rules.append(
            Rule(replace(base, bits=_bits(own), group_size=_group_size(own)), pattern=pattern)
        )
    if not fields.flag("lm_head", default=False):
        rules.append(Rule(None, part="lm_head"))
    return (*rules, Rule(base))


def _awq(fields: ConfigFields) -> tuple[Rule, ...]:
    config = fields.config
    layout = config.get("version") or config.get("format") or "gemm"
    if not isinstance(layout, str) or layout.lower() != "gemm":
        raise _unsupported(fields, f"version {shown(layout)}", "gemm")
    if _bits(fields) != 4:
        raise _unsupported(fields, f"bits {shown(config.get('bits'))}", "4 with awq")
    if not fields.flag("zero_point", default=True):
        raise _unsupported(fields, "zero_point false", "zero_point true")
    group_size = _group_size(fields, "q_group_size" if "q_group_size" in config else "group_size")
    scheme = Scheme("awq", 4, group_size, symmetric=False)
    return (*_kept(fields, "modules_to_not_convert"), Rule(None, part="lm_head"), Rule(scheme))


def _fp8(fields: ConfigFields) -> tuple[Rule, ...]:
    config = fields.config
    if config.get("fmt") not in (None, "e4m3"):
        raise _unsupported(fields, f"fmt {shown(config['fmt'])}", "e4m3")
    kept = [*_kept(fields, "modules_to_not_convert"), *_kept(fields, "ignored_layers")]
    scheme = Scheme("fp8", 8, block=_block(fields, "weight_block_size"))
    return (*kept, Rule(None, part="lm_head"), Rule(scheme))


def _fbgemm(fields: ConfigFields) -> tuple[Rule, ...]:
    kept = _kept(fields, "modules_to_not_convert")
    return (*kept, Rule(None, part="lm_head"), Rule(Scheme("fp8", 8)))


def _bitsandbytes(fields: ConfigFields) -> tuple[Rule, ...]:
    kept = (*_kept(fields, "llm_int8_skip_modules"), Rule(None, part="lm_head"))
    in_4_bits = fields.flag("load_in_4bit", default=False)
    if in_4_bits == fields.flag("load_in_8bit", default=False):
        raise CheckpointError(
            f"{fields.source}: load_in_4bit and load_in_8bit are both {str(in_4_bits).lower()}; one "
            "must be true"
        )
    if not in_4_bits:
        return (*kept, Rule(Scheme("bnb-8bit", 8)))
    levels = fields.config.get("bnb_4bit_quant_type", "fp4")
    if levels not in ("nf4", "fp4"):
        raise _unsupported(fields, f"bnb_4bit_quant_type {shown(levels)}", "nf4, fp4")
    nested = fields.flag("bnb_4bit_use_double_quant", default=False)
    return (*kept, Rule(Scheme("bnb-4bit", 4, nested=nested)))


def _mxfp4(fields: ConfigFields) -> tuple[Rule, ...]:
    return (*_kept(fields, "modules_to_not_convert"), Rule(Scheme("mxfp4", 4, 32)))


_READERS = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": compressed_tensors_rules,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None for null and where it is absent."""
    sizes = fields.items(name)
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise CheckpointError(
            f"{fields.source}: {name} is {shown(sizes)}; it must be two integers >= 1"
        )
    return sizes[0], sizes[1]


def _kept(fields: ConfigFields, name: str) -> tuple[Rule, ...]:
    """Modules in full precision: a name, or whole components of one."""
    return tuple(Rule(None, part=part) for part in texts(fields, name))


def _bits(fields: ConfigFields) -> Literal[4, 8]:
    bits = fields.config.get("bits", fields.config.get("w_bit"))
    if type(bits) is int and bits == 4:
        return 4
    if type(bits) is int and bits == 8:
        return 8
    raise _unsupported(fields, f"bits {shown(bits)}", "4 and 8")


def _group_size(fields: ConfigFields, name: str = "group_size") -> int:
    size = fields.config.get(name, -1)
    if type(size) is not int or not (size == -1 or 0 < size <= MAX_GROUP):
        raise _unsupported(fields, f"{name} {shown(size)}", f"-1 and 1 to {MAX_GROUP}")
    return size


def _unsupported(fields: ConfigFields, setting: str, known: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{fields.source}: {setting} is not supported; supported: {known}. Use the original checkpoint, "
        "or one quantised so"
    )
