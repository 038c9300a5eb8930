"""Find a Hugging Face checkpoint, check and memory-map its weights, build the decoder."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ramify.attention.exactness import ProbeStore
from ramify.errors import CheckpointError, ConfigError, UnsupportedModelError
from ramify.models.config import ModelConfig, token_ids
from ramify.models.decoder import CausalDecoder, Decoder, Family
from ramify.models.deepseek import DEEPSEEK
from ramify.models.dense import DENSE
from ramify.models.families import FAMILIES as NATIVE
from ramify.models.hf_config import read_hf_config
from ramify.models.ops.quantized import QuantizedWeight, Weight
from ramify.models.ops.registry import OpsFactory, select_ops
from ramify.models.weight_layout import reorder_weights

# Families by architecture; all others are dense.
FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekV32ForCausalLM": DEEPSEEK,
}
BUILT_IN = "ramify-tiny"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def find_checkpoint(model: str | Path) -> Path:
    """The directory of a checkpoint: the built-in model, a local directory, or a cached hub snapshot.

    Never opens a connection.

    Raises:
        CheckpointError: there is no such directory, and no cached hub model of that name.
    """
    if str(model) == BUILT_IN:
        built_in = importlib.resources.files("ramify") / "data" / BUILT_IN
        if not isinstance(built_in, Path) or not (built_in / "config.json").is_file():
            raise CheckpointError(
                f"the built-in model {BUILT_IN} is not part of this installation; "
                "reinstall ramify, or name a checkpoint directory"
            )
        return built_in
    try:
        path = Path(model).expanduser()
    # `~name` of an unknown user
    except RuntimeError as error:
        raise CheckpointError(f"there is no directory {str(model)!r}: {error}") from error
    if path.is_dir() and model != "":
        return path
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file; name the directory that holds config.json and the weights"
        )
    name = str(model)
    looks_local = isinstance(model, Path) or name.startswith((".", "~", os.sep))
    if looks_local or name.count("/") > 1 or not name:
        raise CheckpointError(f"there is no directory {name!r}; name a checkpoint directory")
    return _cached_snapshot(name)


def _cached_snapshot(name: str) -> Path:
    """The directory of a hub model's newest snapshot in the local cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"there is no directory {name!r}, and looking for it among cached hub models needs "
            "the package huggingface_hub; install it, or name a checkpoint directory"
        ) from None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise CheckpointError(
            f"there is neither a directory {name!r} nor a cached hub model of that name; "
            f"ramify downloads nothing by itself, so get it with `hf download {name}`, or name "
            f"a checkpoint directory, or try the built-in {BUILT_IN}"
        ) from None


def read_config(path: Path) -> ModelConfig:
    """Read `config.json`, with the end-of-sequence tokens of `generation_config.json` added.

    Raises:
        CheckpointError: config.json is unreadable or contradicts itself.
        UnsupportedModelError: the model is not supported.
    """
    source = path / "config.json"
    fields = _read_json(source)
    config = _model_config(path, fields)
    generation = path / "generation_config.json"
    if not generation.is_file():
        return config
    ends = token_ids(_read_json(generation).get("eos_token_id"), str(generation))
    if not ends:
        return config
    # Drop the family's default: generation_config.json is more specific.
    own = config.eos_token_ids if "eos_token_id" in fields else ()
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*own, *ends))))


def _model_config(path: Path, fields: dict[str, Any]) -> ModelConfig:
    """Of our own families, else of transformers."""
    named = fields.get("architectures") or []
    is_named = isinstance(named, list) and bool(named)
    known = {family.model_type for family in NATIVE.values()}
    is_native = named[0] in NATIVE if is_named else fields.get("model_type") in known
    if is_native:
        return ModelConfig.from_hf(fields, str(path / "config.json"))
    return read_hf_config(path, fields)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint directory holds config.json, safetensors weights "
            "and tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object")
    return content


def load_weights(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, progress: bool = False
) -> dict[str, Tensor]:
    """Load every tensor of `config.tensor_shapes()`, memory-mapped if the file has `dtype` already.

    Args:
        progress: show a progress bar if stderr is a terminal.

    Raises:
        CheckpointError: files are missing or truncated; tensors are missing, unexpected or have
            another shape.
    """
    shapes = config.tensor_shapes()
    weights: dict[str, Tensor] = {}
    # lm_head beside tied embeddings: older tools wrote both.
    duplicate_head: Tensor | None = None
    files = _weight_files(path)
    with _progress("reading weights", len(shapes), progress) as advance:
        for file, promised in files.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as shard:
                    present = set(shard.keys())
                    for name in sorted(promised - present):
                        raise CheckpointError(
                            f"{file} lacks the tensor {name} that {INDEX} promises; "
                            "download both again"
                        )
                    for name in sorted(present):
                        if name in shapes:
                            shape = tuple(shard.get_slice(name).get_shape())
                            _check_shape(file, name, shapes[name], shape)
                            target = torch.float32 if config.is_float32(name) else dtype
                            weights[name] = _cast(shard.get_tensor(name), target, file, name)
                            advance()
                        elif name == HEAD and config.tie_word_embeddings:
                            duplicate_head = _cast(shard.get_tensor(name), dtype, file, name)
                        elif not _is_ignorable(name, config):
                            raise CheckpointError(
                                f"{file} holds the tensor {name}, which {config.architecture} has "
                                "no use for with this config.json; is it the right config.json?"
                            )
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} is corrupt or truncated ({error}); download it again"
                ) from error
    missing = [name for name in shapes if name not in weights]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shapes)} tensors, the first is {missing[0]} "
            f"with shape {list(shapes[missing[0]])}; is config.json of the same model?"
        )
    if duplicate_head is not None and not torch.equal(duplicate_head, weights[EMBEDDING]):
        raise CheckpointError(
            f"{path} has a {HEAD} that is not {EMBEDDING}, but config.json says that they are one "
            "(tie_word_embeddings); which of the two is wrong?"
        )
    return weights


def checkpoint_shapes(path: Path, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint by name.

    Raises:
        CheckpointError: see `load_weights`.
    """
    if config.is_native:
        return config.tensor_shapes()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                names = list(shard.keys())
                shapes |= {name: tuple(shard.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is corrupt or truncated ({error}); download it again"
            ) from error
    return shapes


def _weight_files(path: Path) -> dict[Path, frozenset[str]]:
    """Safetensors files of a checkpoint, each with the tensors that the index says it holds.

    A single model.safetensors wins over an index, as in transformers: the index is left over.
    """
    single = path / "model.safetensors"
    if single.is_file():
        return {single: frozenset()}
    if (path / INDEX).is_file():
        shard_of = _read_json(path / INDEX).get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of:
            raise CheckpointError(f"{path / INDEX} has no weight_map; download it again")
        shards: dict[str, set[str]] = {}
        for name, shard in shard_of.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{path / INDEX}: {name} is in {shard!r}, not a file name")
            shards.setdefault(shard, set()).add(name)
        absent = [shard for shard in sorted(shards) if not (path / shard).is_file()]
        if absent:
            raise CheckpointError(
                f"{path / absent[0]} is missing ({len(absent)} of {len(shards)} shards that "
                f"{INDEX} names); download the checkpoint again"
            )
        return {path / shard: frozenset(shards[shard]) for shard in sorted(shards)}
    others = sorted(file.name for file in path.glob("*.safetensors"))
    if others:
        raise CheckpointError(
            f"{path} has {others[0]} but neither model.safetensors nor {INDEX}; download the "
            "missing files"
        )
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{path} has pickled weights only ({pickled[0]}); loading them can run foreign code, "
            "so they are not read: save the model as safetensors first"
        )
    raise CheckpointError(
        f"{path} has no weights: neither model.safetensors nor {INDEX}; download them, or name "
        "another directory"
    )


def _check_shape(file: Path, name: str, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if expected != shape:
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(shape)} but config.json asks for "
            f"{list(expected)}; is config.json of the same model?"
        )


def _cast(tensor: Tensor, dtype: torch.dtype, file: Path, name: str) -> Tensor:
    """The tensor in `dtype`; the memory-mapped tensor itself if it has that dtype."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(
            f"{file}: tensor {name} is {tensor.dtype}; only float32, bfloat16 and float16 weights "
            "are supported, so use the original checkpoint"
        )
    return tensor.to(dtype)


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether to skip a tensor: a buffer that older tools saved, or a multi-token-prediction layer."""
    layer = name.removeprefix("model.layers.").split(".")[0]
    if config.mla is not None and layer.isdecimal() and int(layer) >= config.num_layers:
        # DeepSeek numbers its multi-token-prediction layers after the last decoder layer.
        return True
    return name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    exact: bool = True,
    ops: str | OpsFactory = "auto",
    quantize: str | None = None,
    progress: bool = False,
    store: ProbeStore | None = None,
) -> Decoder:
    """Load a checkpoint of one of our own families into a decoder that is ready to run.

    Args:
        dtype: of weights and arithmetic, see `resolve_dtype`.
        exact, store: see `TorchOps`.
        ops: a name for `select_ops`, or what makes the operations.
        quantize: "int8" rounds the projections to int8 with a scale for each output channel; they are
            dequantised in each call, which takes less memory and more time. None: `dtype`.
        progress: show progress bars if stderr is a terminal.

    Raises:
        CheckpointError, UnsupportedModelError: see `read_config` and `load_weights`.
        ConfigError: the dtype, `ops` or `quantize` is unknown or cannot be used here.
    """
    if quantize not in (None, "int8"):
        raise ConfigError(f"quantize={quantize!r} does not exist; use 'int8' or None")
    config = read_config(path)
    if not config.is_native:
        raise UnsupportedModelError(
            f"{path}: {config.architecture} runs through transformers only; use load_decoder"
        )
    compute_dtype = resolve_dtype(dtype, config)
    tensors = load_weights(path, config, dtype=compute_dtype, progress=progress)
    if config.mla is None:
        reorder_weights(tensors, config)
    weights: dict[str, Weight] = {**tensors}
    if quantize is not None:
        for name, weight in weights.items():
            # kv_b is used by head, not as a linear.
            is_linear = name.endswith("_proj.weight") and not name.endswith(".kv_b_proj.weight")
            if is_linear and isinstance(weight, Tensor) and not config.is_float32(name):
                weights[name] = QuantizedWeight.int8(weight)
    with _progress("preparing layers", config.num_layers, progress) as advance:
        bound = _ops_factory(ops, compute_dtype)(
            weights,
            dtype=compute_dtype,
            max_len=config.max_model_len,
            exact=exact,
            store=store,
        )
        family = FAMILIES.get(config.architecture, DENSE)
        return Decoder(config, bound, family, on_layer=advance)


def load_decoder(
    path: Path,
    *,
    dtype: str = "auto",
    exact: bool = True,
    ops: str | OpsFactory = "auto",
    progress: bool = False,
    store: ProbeStore | None = None,
) -> CausalDecoder:
    """Load any checkpoint directory: with `load_model`, or through transformers.

    Args and errors are those of `load_model`.
    """
    config = read_config(path)
    if config.is_native:
        return load_model(path, dtype=dtype, exact=exact, ops=ops, progress=progress, store=store)
    from ramify.models.hf import load_hf_decoder

    compute_dtype = resolve_dtype(dtype, config)
    return load_hf_decoder(
        path,
        config,
        dtype=compute_dtype,
        exact=exact,
        make_ops=_ops_factory(ops, compute_dtype),
        max_len=config.max_model_len,
        store=store,
    )


def _ops_factory(ops: str | OpsFactory, dtype: torch.dtype) -> OpsFactory:
    return select_ops(ops, dtype, torch.device("cpu")).factory if isinstance(ops, str) else ops


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
def _progress(description: str, total: int, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar if stderr is a terminal; yields a function that advances it by 1."""
    if not enabled or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)
