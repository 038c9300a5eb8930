"""A checkpoint's tokenizer: `tokenizer.json`, or a file of another format, converted."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from ramify.engine.text.gguf_tokenizer import has_gguf_tokenizer
from ramify.engine.text.ranked_bpe import LLAMA3_PATTERN, tekken_tokenizer, tiktoken_tokenizer
from ramify.engine.text.sentencepiece_model import SentencePieceModel
from ramify.engine.text.tokenizer_limits import check_tokenizer_json
from ramify.errors import CheckpointError
from ramify.library_panics import panics_as_errors
from ramify.models.configs.checkpoint_files import (
    MAX_TOKENIZER_BYTES,
    check_checkpoint_file,
    read_checkpoint_file,
)
from ramify.models.configs.fields import read_optional_json
from ramify.models.gguf.container import is_gguf, read_container

# The first file that a checkpoint has is its tokenizer.
SENTENCEPIECE, TEKKEN = "tokenizer.model", "tekken.json"
TIKTOKEN = ("tiktoken.model", "*.tiktoken")
VOCABULARIES = ("vocab.json", "vocab.txt")
OTHER_FORMATS = (SENTENCEPIECE, TEKKEN, *TIKTOKEN, *VOCABULARIES)
IDS = "or give prompts as token ids"


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer, and the special tokens that its file names: role → text."""

    core: tokenizers.Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint directory, or a GGUF file, has a tokenizer in any format."""
    if is_gguf(path):
        return has_gguf_tokenizer(read_container(path))
    return (path / "tokenizer.json").exists() or _other_format(path) is not None


def read_tokenizer(path: Path, config: Mapping[str, Any]) -> TokenizerFile:
    """Read or convert the tokenizer of a checkpoint directory.

    Args:
        config: of `tokenizer_config.json`.

    Raises:
        CheckpointError: there is none, it cannot be read, or a package for its conversion is missing.
    """
    file = path / "tokenizer.json"
    if file.exists():
        data = read_checkpoint_file(file, MAX_TOKENIZER_BYTES)
        try:
            check_tokenizer_json(data)
            with panics_as_errors("the package tokenizers"):
                return TokenizerFile(tokenizers.Tokenizer.from_buffer(data))
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"{file} cannot be read: {error}; download it again") from error
    other = _other_format(path)
    if other is None:
        raise CheckpointError(
            f"{file} is missing, and so is a tokenizer of another format "
            f"({', '.join(OTHER_FORMATS)}); add one, {IDS}"
        )
    check_checkpoint_file(other, MAX_TOKENIZER_BYTES)
    if other.name in VOCABULARIES:
        return TokenizerFile(_by_transformers(path, other.name))
    try:
        with panics_as_errors("the package tokenizers"):
            return _converted(path, other, config)
    except Exception as error:  # tokenizers raises nothing narrower
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{other} cannot be converted ({reason}); download it again, add the model's "
            f"tokenizer.json, {IDS}"
        ) from error


def _other_format(path: Path) -> Path | None:
    files = (file for pattern in OTHER_FORMATS for file in sorted(path.glob(pattern)))
    return next(files, None)


def _converted(path: Path, file: Path, config: Mapping[str, Any]) -> TokenizerFile:
    if file.name == TEKKEN:
        return TokenizerFile(
            *tekken_tokenizer(read_checkpoint_file(file, MAX_TOKENIZER_BYTES).decode("utf-8"))
        )
    if file.name != SENTENCEPIECE:
        raise ValueError("it does not say how texts are split into words")
    data = read_checkpoint_file(file, MAX_TOKENIZER_BYTES)
    try:
        model = SentencePieceModel.parse(data)
    except ValueError:
        if not data[:4].isascii():
            raise
        # Llama 3's file of this name has tiktoken's form.
        if str(read_optional_json(path / "config.json").get("model_type", "")) not in ("llama", ""):
            raise
        return TokenizerFile(tiktoken_tokenizer(data, LLAMA3_PATTERN))
    model = model.with_added_tokens(config)
    return TokenizerFile(model.convert(config), model.special_tokens())


def _by_transformers(path: Path, name: str) -> tokenizers.Tokenizer:
    """Let transformers build its fast tokenizer, which is one of the tokenizers package.

    How a vocabulary in text splits words is in the class that the checkpoint's files name.
    """
    hint = f"to convert {name}: pip install 'ramify[hf]'; {IDS}"
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(f"{path} has {name} but no tokenizer.json; {hint}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    # Transformers raises what the converters raise.
    except (
        ValueError,
        OSError,
        ImportError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: {name} cannot be converted ({reason}); {hint}") from error
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise CheckpointError(
            f"{path}: transformers has no fast tokenizer for {name} ({type(tokenizer).__name__}); "
            "give prompts as token ids"
        )
    copy: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(core.to_str())
    return copy
