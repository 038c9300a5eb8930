"""An index of shards that is damaged, or says what the shards do not hold."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ramify.attention.exactness import ProbeStore
from ramify.errors import CheckpointError, ModelError
from ramify.models.checkpoint.safetensors_files import weight_files
from ramify.models.loader import load_model
from ramify.testing import write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
NAMES = ["", ".", "..", "/", "/etc/passwd", "../x.safetensors", "a/b", "a\0b", "x" * 5000, "\ud800"]
VALUES: list[Any] = [None, True, 3, -1.5, [], {}, ["x"], {"x": 1}, *NAMES, "config.json", "absent"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    return write_tiny_checkpoint(folder, "llama", tokenizer=False, num_hidden_layers=1, shards=3)


def load(path: Path) -> None:
    load_model(path, dtype="float32", ops="torch", store=ProbeStore(None), exact=False)


@pytest.mark.parametrize("name", NAMES, ids=[f"name-{index}" for index in range(len(NAMES))])
def test_a_shard_that_is_no_file_name_is_named(sharded: Path, name: str, tmp_path: Path) -> None:
    """Whatever stands for a shard's name, one short CheckpointError names the index or it."""
    index = json.loads((sharded / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | {"weight_map": {"lm_head.weight": name}}))

    with pytest.raises(CheckpointError, match=r"not a file name|is missing") as caught:
        weight_files(tmp_path)

    assert len(str(caught.value)) < len(str(tmp_path)) + 400
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_indexes_are_model_errors(seed: int, sharded: Path) -> None:
    """Entries moved, removed, added and replaced, or bytes changed: one error, or the model loads."""
    file, rng = sharded / INDEX, random.Random(seed)
    good = file.read_text()
    messages: list[str] = []
    try:
        for _ in range(50):
            file.write_bytes(_damaged(good, rng))
            try:
                load(sharded)
            except ModelError as error:
                messages.append(str(error))
    finally:
        file.write_text(good)

    assert len(messages) > 25
    assert all(str(sharded) in message for message in messages)
    load(sharded)


def _damaged(good: str, rng: random.Random) -> bytes:
    index = json.loads(good)
    places: dict[str, Any] = index["weight_map"]
    for _ in range(rng.choice((1, 1, 3))):
        name = rng.choice(list(places) or [""])
        kind = rng.randrange(6)
        if kind == 0:
            places[name] = rng.choice(VALUES)
        elif kind == 1:
            places.pop(name, None)
        elif kind == 2:
            places[name] = rng.choice([*places.values(), "absent"])
        elif kind == 3:
            places[rng.choice((*NAMES, f"{name}x"))] = rng.choice([*places.values(), "absent"])
        elif kind == 4:
            index["weight_map"] = rng.choice((*VALUES, places))
            break
        else:
            body = bytearray(json.dumps(index).encode())
            at = rng.randrange(len(body))
            body[at : at + rng.choice((0, 1, 30))] = rng.randbytes(rng.choice((0, 1, 2)))
            return bytes(body)
    return json.dumps(index).encode()
