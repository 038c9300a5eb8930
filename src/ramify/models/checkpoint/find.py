"""Find a checkpoint: a directory, a model of a package, a hub model that is cached or can be downloaded."""

from __future__ import annotations

import difflib
import importlib.resources
import json
import os
import re
from pathlib import Path

from ramify.errors import CheckpointError
from ramify.models.checkpoint.packaged import PACKAGED_MODELS, packaged_model
from ramify.models.configs.checkpoint_files import MAX_JSON_BYTES, read_checkpoint_file
from ramify.models.gguf.container import ANY_CASE, PART, is_gguf

BUILT_IN = "ramify-tiny"
INDEX = "model.safetensors.index.json"
# Of a hub model: weights that can be read, configuration, tokenizer. No pickles, no code.
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SAVED_PICKLES = ("pytorch_model*.bin", "consolidated*.pth")  # those of whole models
PICKLED_ONLY = (
    "has pickled weights only ({}); loading them can run foreign code, so they are not read: save the "
    "model as safetensors first"
)
# `owner/name`, or a name alone, as the oldest hub models have.
HUB_NAME = re.compile(r"(?:[\w.-]+/)?\w[\w.-]*")
FILE_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")
TEXT_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
PATTERNS = [*TEXT_PATTERNS, "*.safetensors"]


def find_checkpoint(
    model: str | Path, *, revision: str | None = None, offline: bool = False
) -> Path:
    """The directory of a checkpoint, or a GGUF file: built in, a local path, of a package, or of the hub.

    Of a directory whose only model is in GGUF it is that file, or the first part of it.

    Args:
        revision: branch, tag or commit of a hub model; None: main.
        offline: look for hub models in the local cache only; so does HF_HUB_OFFLINE=1.

    Raises:
        CheckpointError: there is no such directory, a model's package is not installed, or the hub model is
            neither cached nor can it be downloaded.
    """
    return _find(model, revision, PATTERNS, offline=offline)


def find_text_files(
    model: str | Path, *, revision: str | None = None, offline: bool = False
) -> Path:
    """Where the tokenizer, chat template and configuration of a checkpoint are; see `find_checkpoint`.

    Of a hub model no weights are downloaded.

    Raises:
        CheckpointError: see `find_checkpoint`.
    """
    return _find(model, revision, TEXT_PATTERNS, offline=offline)


def _find(model: str | Path, revision: str | None, patterns: list[str], *, offline: bool) -> Path:
    return find_here(model) or _hub_snapshot(str(model), revision, patterns, offline=offline)


def find_here(model: str | Path) -> Path | None:
    """A checkpoint that is built in, a local path, or of a package; None: the name may be a hub model's.

    Raises:
        CheckpointError: there is no such path or package, and the name cannot be a hub model's, or is
            nearly that of a model that comes without the hub.
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
        check_format(path)
        return _gguf_in(path) or path
    if path.is_file():
        if is_gguf(path):
            return path
        raise CheckpointError(
            f"{path} is a file, and not in GGUF (.gguf); name the directory that holds config.json and the "
            "weights"
        )
    name = str(model)
    packaged = packaged_model(name)
    if packaged is not None:
        return packaged
    if is_gguf(path):
        raise CheckpointError(
            f"there is no file {name!r}; name a GGUF file, or a directory that has one"
        )
    looks_local = isinstance(model, Path) or name.startswith((".", "~", os.sep))
    if looks_local or name.count("/") > 1 or not name:
        raise CheckpointError(f"there is no directory {name!r}; name a checkpoint directory")
    near = _near_name(name)
    if near:
        raise CheckpointError(
            f"there is no directory {name!r}; do you mean {near}? Models that need no hub: {_names()}"
        )
    if not HUB_NAME.fullmatch(name) or path.suffix in FILE_SUFFIXES:
        raise CheckpointError(
            f"there is no directory or file {name!r}, and it is no name of a hub model; name a checkpoint "
            f"directory, or one of {_names()}"
        )
    return None


def _near_name(name: str) -> str:
    """The built-in or packaged model whose name is nearly this one; "" if there is none."""
    names = [BUILT_IN, *PACKAGED_MODELS]
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)), "")


def _names() -> str:
    """The models that need no hub, and how to get those that are not installed."""
    packaged = (
        f"{name} ({'installed' if model.is_installed else model.install_command})"
        for name, model in PACKAGED_MODELS.items()
    )
    return ", ".join((f"{BUILT_IN} (built in)", *packaged))


def check_format(path: Path) -> None:
    """Refuse a directory that holds a model in another form than a checkpoint.

    Raises:
        CheckpointError: it is a LoRA adapter, or of Mistral's or diffusers' own format.
    """
    if (path / "adapter_config.json").is_file() and not has_weight_files(path):
        raise CheckpointError(
            f"{path} is an adapter (adapter_config.json) without the model that it changes; merge both "
            "with peft's merge_and_unload, and save the result"
        )
    if (path / "config.json").is_file() or any(path.glob(ANY_CASE)):
        return
    for name, form in (("params.json", "Mistral's own"), ("model_index.json", "the diffusers")):
        if (path / name).is_file():
            raise CheckpointError(
                f"{path} is in {form} format ({name}); a checkpoint of transformers is needed, with "
                "config.json and model.safetensors"
            )


def _gguf_in(path: Path) -> Path | None:
    """The GGUF file of a directory without weights in safetensors; None if it has none.

    Raises:
        CheckpointError: there are several models.
    """
    if has_weight_files(path):
        return None
    models: dict[str, Path] = {}
    for file in sorted(path.glob(ANY_CASE)):
        if file.is_file() and not file.name.startswith("mmproj"):
            models.setdefault(PART.sub("", file.name), file)
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise CheckpointError(
            f"{path} has {len(models)} models in GGUF: {names}; name one of the files"
        )
    return next(iter(models.values()), None)


def has_weight_files(path: Path) -> bool:
    """Whether a directory has a file of weights, or the index of one."""
    return (path / "model.safetensors").is_file() or (path / INDEX).is_file()


def _hub_snapshot(name: str, revision: str | None, patterns: list[str], *, offline: bool) -> Path:
    """The directory of a hub model's snapshot in the local cache, downloaded if it is not there.

    Args:
        patterns: of the files that are needed, `PATTERNS` or `TEXT_PATTERNS`.
    """
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError:
        raise CheckpointError(
            f"there is no directory {name!r}, and looking for it among hub models needs the package "
            "huggingface_hub; install it, or name a checkpoint directory"
        ) from None
    at = f" at revision {revision}" if revision else ""
    hint = f"name a checkpoint directory, or one of {_names()}"
    is_offline = offline or constants.HF_HUB_OFFLINE
    try:
        cached = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=True
            )
        )
        file = _pickled_only(cached)
        # Raise before asking the hub: that takes minutes where the network drops packets.
        if file is not None:
            raise CheckpointError(
                f"{cached} {PICKLED_ONLY.format(file)}, or get its safetensors, if the hub has any, "
                f"with `hf download {name}`"
            )
        # A snapshot may be partial (interrupted, or of another program): download the rest.
        is_whole = _has_weights(cached) if patterns is PATTERNS else _has_texts(cached)
        if is_offline or is_whole:
            return cached
    except HFValidationError as error:
        raise CheckpointError(
            f"there is no directory {name!r}, and it is no name of a hub model: {error}; {hint}"
        ) from None
    except LocalEntryNotFoundError:
        if is_offline:
            raise CheckpointError(
                f"there is neither a directory {name!r} nor a cached hub model of that name{at}, and "
                f"offline is set; get it with `hf download {name}`, or {hint}"
            ) from None
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=patterns, etag_timeout=5)
        )
    # No such model, revision or permission; no network: httpx and urllib3 raise OSErrors of their own.
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"there is no directory {name!r}, and the hub model of that name{at} cannot be "
            f"downloaded ({reason}); get it with `hf download {name}` where there is a network, or {hint}"
        ) from None


def pickled_weights(path: Path) -> str | None:
    """The name of the first file of pickled weights in a directory; None if it has none."""
    names = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    return names[0] if names else None


def _pickled_only(path: Path) -> str | None:
    """The name of a snapshot's pickled weights; None if it has none, or a file of safetensors."""
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return None
    names = [file.name for pattern in SAVED_PICKLES for file in path.glob(pattern)]
    return min(names, default=None)


def _has_weights(path: Path) -> bool:
    """Whether a snapshot has its configuration and all its shards."""
    if not (path / "config.json").is_file():
        return False
    if (path / "model.safetensors").is_file():
        return True
    try:
        index = json.loads(read_checkpoint_file(path / INDEX, MAX_JSON_BYTES))
        return all((path / shard).is_file() for shard in index["weight_map"].values())
    except (CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _has_texts(path: Path) -> bool:
    """Whether a snapshot has its configuration and a tokenizer in the usual format."""
    return all(
        (path / name).is_file()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
