"""Files of a checkpoint that are no files, too large, or made to exhaust time and memory."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError
from ramify.models.configs.fields import read_json

TINY = Path(ramify.__file__).parent / "data" / "ramify-tiny"
NAMES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the built-in model's tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "sparse"])
def test_what_is_no_file_is_refused_before_it_is_read(folder: Path, name: str, kind: str) -> None:
    """The error names it and says what it is, at once; nothing is read."""
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    words = {"pipe": "is a named pipe", "device": "is a device", "directory": "is a directory"}
    begin = time.monotonic()

    with pytest.raises(CheckpointError, match=name) as caught:
        Tokenizer.load(folder)

    assert words.get(kind, "1,099,511,627,776 bytes") in str(caught.value)
    assert time.monotonic() - begin < 10


def tokenizer_with(folder: Path, **fields: Any) -> None:
    """Replace parts of the tokenizer in a directory."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 99}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [4_000_000_000], "tokens": ["x"]}},
}
PIECE = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": True,
}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
            "its normalizer may",
        ),
        ({"normalizer": BETWEEN}, "its normalizer may"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}}, "its normalizer may"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 40}}, "its decoder may"),
        ({"post_processor": TEMPLATE}, "token id 4000000000"),
        (
            {
                "post_processor": {
                    "type": "BertProcessing",
                    "sep": ["x", 4_000_000_000],
                    "cls": ["x", 1],
                }
            },
            "token id 4000000000",
        ),
        (
            {
                "added_tokens": [
                    PIECE | {"id": 400 + i, "content": f"<x{i}>"} for i in range(200_000)
                ]
            },
            "200,000 added tokens",
        ),
    ],
    ids=["doubling", "between", "prepend", "decoder", "template", "bert", "added"],
)
def test_a_tokenizer_without_bounds_is_refused(
    folder: Path, fields: dict[str, Any], words: str
) -> None:
    """One line, little time and little memory."""
    tokenizer_with(folder, **fields)
    begin = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read") as caught:
            Tokenizer.load(folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.thread_time() - begin < 5
    assert peak_bytes < 200e6


def test_messages_are_short_and_printable(tmp_path: Path) -> None:
    """Names of a checkpoint neither fill the terminal nor change it."""
    folder = tmp_path / "a\x1b[31m\nb"
    folder.mkdir()
    (folder / "config.json").write_text("[")

    with pytest.raises(CheckpointError) as caught:
        read_json(folder / "config.json")

    assert str(caught.value).isprintable()
    assert "a\\x1b[31m\\nb" in str(caught.value)
    assert len(str(CheckpointError("x" * 10**6))) == 2000
