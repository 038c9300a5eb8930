"""A checkpoint's tokenizer: `tokenizer.json`, or another format that transformers converts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import tokenizers

from ramify.errors import CheckpointError

# Files of other formats, and the packages that their conversion needs beside transformers.
OTHER_FORMATS = {
    "tokenizer.model": "sentencepiece protobuf",
    "tekken.json": "mistral-common",
    "*.tiktoken": "tiktoken",
    "vocab.json": "",
    "vocab.txt": "",
}


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint directory has a tokenizer in any format."""
    return (path / "tokenizer.json").is_file() or _other_format(path) is not None


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read or convert the tokenizer of a checkpoint directory.

    Raises:
        CheckpointError: there is none, it cannot be read, or a package for its conversion is missing.
    """
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(f"{file} cannot be read: {error}; download it again") from error
    other = _other_format(path)
    if other is None:
        raise CheckpointError(
            f"{file} is missing, and so is a tokenizer of another format "
            f"({', '.join(OTHER_FORMATS)}); add one, or give prompts as token ids"
        )
    return _convert(path, other)


def _other_format(path: Path) -> str | None:
    return next((pattern for pattern in OTHER_FORMATS if any(path.glob(pattern))), None)


def _convert(path: Path, pattern: str) -> tokenizers.Tokenizer:
    """Let transformers build its fast tokenizer, which is one of the tokenizers package."""
    packages = " ".join(filter(None, ("'ramify[hf]'", OTHER_FORMATS[pattern])))
    found = next(iter(sorted(path.glob(pattern)))).name
    hint = f"to convert {found}: pip install {packages}; or give prompts as token ids"
    if importlib.util.find_spec("transformers") is None:
        raise CheckpointError(f"{path} has {found} but no tokenizer.json; {hint}")
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
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: {found} cannot be converted ({reason}); {hint}") from error
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        raise CheckpointError(
            f"{path}: transformers has no fast tokenizer for {found} ({type(tokenizer).__name__}); "
            "give prompts as token ids"
        )
    copy: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(core.to_str())
    return copy
