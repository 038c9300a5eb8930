"""Hugging Face names of a model's tensors -> where they lie in a GGUF file, and what has to be undone. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ramify.errors import CheckpointError, shortened
from ramify.models.configs.model_config import ModelConfig
from ramify.models.gguf.architectures import LAYER_NAMES, Architecture
from ramify.models.gguf.config import EMBEDDING, HEAD, ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from ramify.models.gguf.container import Container, TensorInfo

TOP_NAMES = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": HEAD,
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?")
EXPERT = re.compile(r".+\.experts\.(\d+)\.(\w+)")
HEAD_NORM = re.compile(r"(.+)\.norms\.(\d+)")
# Matrices of an expert -> their stacks.
STACKS = {
    "gate_proj": ("ffn_gate",),
    "up_proj": ("ffn_up",),
    "down_proj": ("ffn_down",),
    "w1": ("ffn_gate",),
    "w3": ("ffn_up",),
    "w2": ("ffn_down",),
    "gate_up_proj": ("ffn_gate", "ffn_up"),
}
QUERY, KEY, VALUE = "attn_q", "attn_k", "attn_v"
FUSED_QKV = "attn_qkv"
# Tensors of which the configuration is made, or that belong to an encoder.
IGNORED = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
OTHER_PARTS = ("v.", "mm.", "a.")


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a tensor of the file."""

    info: TensorInfo
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How a tensor of the model is made from the file.

    Args:
        parts: rows of the file's tensors, one after the other.
        shape: of the result.
        num_heads: rows have rotary pairs of this many heads as neighbours; 0: they lie as in the model.
        offset: was added to the values.
    """

    parts: tuple[Rows, ...]
    shape: tuple[int, ...]
    num_heads: int = 0
    offset: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(rows.count * rows.info.row_bytes for rows in self.parts)

    @property
    def kind(self) -> str:
        """Types of the file's tensors."""
        return "+".join(dict.fromkeys(rows.info.kind.name for rows in self.parts))


def plan_tensors(
    container: Container, architecture: Architecture, config: ModelConfig
) -> dict[str, TensorPlan]:
    """Find every tensor of `config.tensor_shapes()` in a file.

    Raises:
        CheckpointError: tensors are missing, unexpected, or have another shape.
    """
    finder = _Finder(container, architecture, config)
    plans, missing = dict[str, TensorPlan](), list[str]()
    for name, shape in config.tensor_shapes().items():
        parts = finder.find(name)
        if parts is None:
            missing.append(name)
            continue
        _check_shape(container, name, shape, parts)
        plans[name] = TensorPlan(
            tuple(parts), shape, finder.permuted_heads(name), finder.offset(name)
        )
    if missing:
        raise CheckpointError(
            f"{container.path} lacks {len(missing)} of {len(config.tensor_shapes())} tensors, the first is "
            f"{missing[0]}; is it a whole model? (all parts of a split file have to be in one directory)"
        )
    used = {id(rows.info) for plan in plans.values() for rows in plan.parts}
    for name, info in container.tensors.items():
        if id(info) not in used and not _is_ignorable(name, config):
            raise CheckpointError(
                f"{container.path} holds the tensor {shortened(name)}, which {config.architecture} has no "
                "use for with this metadata; use the original checkpoint in safetensors"
            )
    return plans


class _Finder:
    """Looks tensors up by the names of the model."""

    def __init__(
        self, container: Container, architecture: Architecture, config: ModelConfig
    ) -> None:
        self._tensors, self._architecture, self._config = (
            container.tensors,
            architecture,
            config,
        )
        self._names: Mapping[str, str] = {**LAYER_NAMES, **architecture.names}

    def find(self, name: str) -> list[Rows] | None:
        """The rows of a tensor; None if the file does not have them all."""
        top = TOP_NAMES.get(name)
        if top is not None:
            return self._rows(top)
        match = LAYER.fullmatch(name)
        if match is None:
            return None
        layer, stem, suffix = f"blk.{match[1]}.", match[2], match[3] or ".weight"
        if stem.endswith("e_score_correction_bias"):
            suffix = ".bias"
        expert, norm = EXPERT.fullmatch(stem), HEAD_NORM.fullmatch(stem)
        if expert is not None:
            return self._expert(layer, int(expert[1]), STACKS.get(expert[2], ()), suffix)
        if norm is not None:
            return self._rows(f"{layer}{self._names.get(norm[1])}{suffix}", int(norm[2]), 1)
        if stem.startswith("self_attn.") and stem.endswith(("q_proj", "k_proj", "v_proj")):
            return self._attention(layer, self._names[stem], suffix)
        if stem == "self_attn.qkv_proj":
            return self._rows(f"{layer}{FUSED_QKV}{suffix}") or self._joined(
                layer, (QUERY, KEY, VALUE), suffix
            )
        return self._rows(f"{layer}{self._names.get(stem)}{suffix}")

    def permuted_heads(self, name: str) -> int:
        """Heads of a tensor whose rotary pairs are neighbours in the file; 0: none are."""
        if not self._architecture.permutes_heads:
            return 0
        if ".q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".k_proj." in name else 0

    def offset(self, name: str) -> float:
        """What was added to the values of a tensor."""
        is_norm = name.endswith(("norm.weight", "layernorm.weight"))
        return self._architecture.norm_offset if is_norm else 0.0

    def _rows(self, name: str, first: int = 0, count: int | None = None) -> list[Rows] | None:
        """Rows of one tensor, by default all."""
        info = self._tensors.get(name)
        if info is None:
            return None
        count = info.num_rows if count is None else count
        return [Rows(info, first, count)] if first + count <= info.num_rows else None

    def _joined(self, layer: str, names: tuple[str, ...], suffix: str) -> list[Rows] | None:
        return _all(self._rows(f"{layer}{name}{suffix}") for name in names)

    def _attention(self, layer: str, name: str, suffix: str) -> list[Rows] | None:
        """A projection of its own, or rows of the one matrix of all three."""
        own = self._rows(f"{layer}{name}{suffix}")
        fused = self._tensors.get(f"{layer}{FUSED_QKV}{suffix}")
        if own is not None or fused is None or len(fused.shape) < 2:
            return own
        width = self._config.num_heads * self._config.head_dim
        kv_width = self._config.num_kv_heads * self._config.head_dim
        first = {QUERY: 0, KEY: width, VALUE: width + kv_width}[name]
        return self._rows(
            f"{layer}{FUSED_QKV}{suffix}", first, width if name == QUERY else kv_width
        )

    def _expert(
        self, layer: str, number: int, names: tuple[str, ...], suffix: str
    ) -> list[Rows] | None:
        """Rows of an expert in the stacks of all, or in files of early converters a tensor of its own."""

        def rows(name: str) -> list[Rows] | None:
            stack = self._tensors.get(f"{layer}{name}_exps{suffix}")
            if stack is None:
                return self._rows(f"{layer}{name}.{number}{suffix}")
            count = prod(stack.shape[1:-1])
            return self._rows(f"{layer}{name}_exps{suffix}", number * count, count)

        return _all(map(rows, names)) if names else None


def _all(plans: Iterator[list[Rows] | None]) -> list[Rows] | None:
    """The rows of all, one after the other; None if there are none of one."""
    rows: list[Rows] = []
    for part in plans:
        if part is None:
            return None
        rows += part
    return rows


def _check_shape(
    container: Container, name: str, shape: tuple[int, ...], parts: list[Rows]
) -> None:
    """Rows and their width have to be those of the model; dimensions of 1 count for nothing."""
    widths = {rows.info.shape[-1] for rows in parts}
    num_rows = sum(rows.count for rows in parts)
    if len(shape) == 1:
        fits = num_rows == len(parts) and sum(rows.info.shape[-1] for rows in parts) == shape[0]
    else:
        fits = widths == {shape[-1]} and num_rows == prod(shape[:-1])
    if not fits:
        stored = ", ".join(str(list(rows.info.shape)) for rows in parts)
        raise CheckpointError(
            f"{container.path}: tensor {name}: expected the shape {list(shape)} by the metadata, found "
            f"{stored}; download it again"
        )


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is no part of the decoder: a draft layer behind the last, an encoder."""
    layer = name.removeprefix("blk.").split(".")[0]
    is_later = name.startswith("blk.") and layer.isdecimal() and int(layer) >= config.num_layers
    return name in IGNORED or is_later or name.startswith(OTHER_PARTS)
