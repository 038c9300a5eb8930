"""Read the configuration of a checkpoint or a GGUF file, build the decoder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ramify.attention.exactness import ProbeStore
from ramify.errors import ConfigError, UnsupportedModelError
from ramify.models.checkpoint.changed_weights import (
    FORMATS,
    QUANTIZE,
    ROW_BITS,
    change_weights,
    with_activations,
)
from ramify.models.checkpoint.counted_weights import counted
from ramify.models.checkpoint.heap import trim_heap
from ramify.models.checkpoint.on_device import WeightsOnDevice
from ramify.models.checkpoint.safetensors_files import tensor_names
from ramify.models.checkpoint.sources import open_source
from ramify.models.checkpoint.tensor_names import HEAD_LAYER
from ramify.models.checkpoint.tensors import with_stored_head
from ramify.models.checkpoint.weight_layout import OrderedWeights
from ramify.models.checkpoint.weight_source import WeightSource, log_widened
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.fields import read_json, read_optional_json
from ramify.models.configs.model_config import ModelConfig, token_ids
from ramify.models.configs.quantization.config import with_settings_beside
from ramify.models.configs.wrappers import find_wrapper, text_fields
from ramify.models.decoders.decoder import CausalDecoder, Decoder, DecoderBinding
from ramify.models.decoders.deepseek import DEEPSEEK
from ramify.models.decoders.dense import DENSE
from ramify.models.gguf.config import config_fields
from ramify.models.gguf.container import is_gguf, read_container
from ramify.models.hf.config import read_hf_config
from ramify.models.ops.quantized import Weight
from ramify.models.ops.registry import OpsFactory, select_ops
from ramify.models.ops.torch_ops import CPU

# By architecture; all others are dense.
BINDINGS: dict[str, DecoderBinding] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
}


def read_config(path: Path) -> ModelConfig:
    """Read `config.json`, with the end-of-sequence tokens of `generation_config.json` added, or a GGUF file's.

    Raises:
        CheckpointError: config.json is unreadable or contradicts itself, or the GGUF file does.
        UnsupportedModelError: the model is not supported.
    """
    if is_gguf(path):
        return ModelConfig.from_hf(config_fields(read_container(path)), str(path))
    fields = with_settings_beside(read_json(path / "config.json"), path)
    wrapper = find_wrapper(fields)
    if wrapper is not None:
        has_head = any(f".{HEAD_LAYER}." in f".{name}" for name in tensor_names(path))
        fields = text_fields(fields, str(path / "config.json"), wrapper, has_head=has_head)
    config = dataclasses.replace(_model_config(path, fields), wrapper=wrapper)
    generation = path / "generation_config.json"
    ends = token_ids(read_optional_json(generation).get("eos_token_id"), str(generation))
    if not ends:
        return config
    # Drop the family's default: generation_config.json is more specific.
    own = config.eos_token_ids if "eos_token_id" in fields else ()
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*own, *ends))))


def _model_config(path: Path, fields: dict[str, Any]) -> ModelConfig:
    """Of our own families, else of transformers."""
    named = fields.get("architectures") or []
    is_named = isinstance(named, list) and bool(named)
    known = {family.model_type for family in FAMILIES.values()}
    is_native = str(named[0]) in FAMILIES if is_named else str(fields.get("model_type")) in known
    if is_native:
        return ModelConfig.from_hf(fields, str(path / "config.json"))
    return read_hf_config(path, fields)


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    exact: bool = True,
    ops: str | OpsFactory = "auto",
    quantize: str = "off",
    activations: str = "int16",
    progress: bool = False,
    store: ProbeStore | None = None,
    max_model_len: int | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """Load a checkpoint of one of our own families into a decoder that is ready to run.

    Args:
        dtype: of weights and arithmetic, see `resolve_dtype`.
        exact, store: see `TorchOps`.
        ops: a name for `select_ops`, or what makes the operations.
        quantize: see `change_weights`.
        activations: see `with_activations`; without effect on operations in torch.
        progress: show progress bars if stderr is a terminal.
        max_model_len: of the engine, by default `ModelConfig.default_model_len`.
        device: of the weights and of the arithmetic.

    Raises:
        CheckpointError, UnsupportedModelError: see `read_config` and `open_source`.
        ConfigError: the dtype, `ops`, `quantize` or `activations` is unknown or cannot be used here.
    """
    if quantize not in QUANTIZE:
        raise ConfigError(f"quantize={quantize!r} does not exist; use {', '.join(QUANTIZE)}")
    if activations not in ROW_BITS:
        raise ConfigError(f"activations={activations!r} does not exist; use {', '.join(ROW_BITS)}")
    config = read_config(path)
    if not config.is_native:
        raise UnsupportedModelError(
            f"{path}: {config.architecture} runs through transformers only; use load_decoder"
        )
    config = config.at_context(max_model_len or config.default_model_len)
    compute_dtype = resolve_dtype(dtype, config)
    source, config = open_weights(path, config, dtype=compute_dtype, quantize=quantize)
    source = with_activations(source, activations, quantize, str(path))
    decoder = bind_decoder(
        source,
        config,
        dtype=compute_dtype,
        exact=exact,
        ops=ops,
        progress=progress,
        store=store,
        device=device,
    )
    is_quantised = any(weight.dtype is None for weight in decoder.loaded.values())
    if activations != "int16" and not is_quantised:
        raise ConfigError(
            f"activations={activations!r} concerns quantised weights, and all those of {path} are widened to "
            f"{str(compute_dtype).removeprefix('torch.')}; leave it out"
        )
    return decoder


def open_weights(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, quantize: str
) -> tuple[WeightSource, ModelConfig]:
    """The weights of a checkpoint as `quantize` says, and the configuration with the head that it has.

    Raises:
        CheckpointError, UnsupportedModelError, ConfigError: see `load_model`.
    """
    if not is_gguf(path):
        config = with_stored_head(path, config)
    source = open_source(path, config, dtype=dtype)
    return change_weights(source, config, quantize, str(path)), config


def bind_decoder(
    source: WeightSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    exact: bool = True,
    ops: str | OpsFactory = "auto",
    progress: bool = False,
    store: ProbeStore | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """Bind the weights of a source to operations; reads all of them.

    Args:
        config: see `ModelConfig.at_context`.
        dtype: of arithmetic; that of the source's weights.
        exact, ops, progress, store, device: see `load_model`.
    """
    source, loaded = counted(source)
    weights: Mapping[str, Weight] = source
    if config.mla is None:
        weights = OrderedWeights(source, config)
    if device.type != "cpu":
        weights = WeightsOnDevice(weights, device)
    total = sum(map(source.num_bytes, source))
    with _progress("loading weights", total, progress) as advance:
        share = total // config.num_layers

        def layer_bound() -> None:
            advance(share)
            trim_heap()

        bound = _ops_factory(ops, dtype, device)(
            weights,
            dtype=dtype,
            max_len=config.max_model_len,
            exact=exact,
            store=store,
            device=device,
        )
        binding = BINDINGS.get(config.architecture, DENSE)
        decoder = Decoder(config, bound, binding, loaded=loaded, on_layer=layer_bound)
    log_widened(source, dtype)
    return decoder


def load_decoder(
    path: Path,
    *,
    dtype: str = "auto",
    exact: bool = True,
    ops: str | OpsFactory = "auto",
    quantize: str = "off",
    activations: str = "int16",
    progress: bool = False,
    max_model_len: int | None = None,
    device: torch.device = CPU,
) -> CausalDecoder:
    """Load any checkpoint directory: with `load_model`, or through transformers.

    Args and errors are those of `load_model`, with the user's `ProbeStore`.
    """
    config = read_config(path)
    if config.is_native:
        return load_model(
            path,
            dtype=dtype,
            exact=exact,
            ops=ops,
            quantize=quantize,
            activations=activations,
            progress=progress,
            max_model_len=max_model_len,
            device=device,
        )
    if device.type != "cpu":
        raise ConfigError(
            f"device={str(device)!r}, but {path} runs through transformers ({config.architecture}), which "
            "is checked on a CPU only; use device='cpu'"
        )
    for name, value in (("quantize", quantize), ("activations", activations)):
        if value in FORMATS:
            raise ConfigError(
                f"{name}={value!r}, but {path} runs through transformers ({config.architecture}), "
                "where nothing is rounded; leave it out"
            )
    from ramify.models.hf.decoder import load_hf_decoder

    compute_dtype = resolve_dtype(dtype, config)
    return load_hf_decoder(
        path,
        config,
        dtype=compute_dtype,
        exact=exact,
        make_ops=_ops_factory(ops, compute_dtype, device),
        max_len=config.max_model_len,
    )


def _ops_factory(ops: str | OpsFactory, dtype: torch.dtype, device: torch.device) -> OpsFactory:
    return select_ops(ops, dtype, device).factory if isinstance(ops, str) else ops


def resolve_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """The dtype to compute in; `auto` is the checkpoint's, but float32 for float16.

    float16 arithmetic is slow on CPUs, and float32 loses nothing.

    Raises:
        ConfigError: `dtype` is not auto, float32 or bfloat16.
    """
    names: Mapping[str, torch.dtype] = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "auto": torch.bfloat16 if config.torch_dtype == "bfloat16" else torch.float32,
    }
    if dtype not in names:
        raise ConfigError(f"dtype={dtype!r} is not possible; use auto, float32 or bfloat16")
    return names[dtype]


@contextmanager
def _progress(description: str, total: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show bytes on a progress bar if stderr is a terminal; yields a function that adds to them."""
    if not enabled or not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(description), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
