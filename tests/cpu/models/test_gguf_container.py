"""The GGUF container: what a writer wrote, and damaged headers refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ramify.errors import CheckpointError
from ramify.models.gguf.container import read_container

gguf = pytest.importorskip("gguf", reason="the oracle of these tests")


def written(path: Path) -> bytes:
    """A file of two tensors and keys of several kinds."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("scores", [0.5, 1.5])
    writer.add_bool("flag", True)
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    blocks = np.arange(72, dtype=np.uint8).reshape(2, 36)
    writer.add_tensor("b.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_written_file_is_read(tmp_path: Path) -> None:
    """Keys, shapes and the bytes of rows."""
    path = tmp_path / "m.gguf"
    written(path)

    container = read_container(path)

    assert container.metadata["llama.block_count"] == 2
    assert container.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    assert container.metadata["scores"].tolist() == [0.5, 1.5]
    assert container.metadata["flag"] is True
    first, second = container.tensors["a.weight"], container.tensors["b.weight"]
    assert (first.shape, second.shape, second.kind.name) == ((2, 3), (2, 64), "Q4_0")
    assert first.read().view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.read().ravel().tolist() == list(range(72))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """At each byte before the end of the last tensor."""
    path = tmp_path / "m.gguf"
    data = written(path)
    last = read_container(path).tensors["b.weight"]

    for length in range(last.start + last.num_bytes):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="expected"):
            read_container(path)


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Never another exception, whichever byte of the header has which extreme value."""
    path = tmp_path / "m.gguf"
    data = written(path)
    start = read_container(path).tensors["a.weight"].start

    for at in range(start):
        for value in (0, 1, 9, 127, 128, 255):
            path.write_bytes(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                read_container(path)
            except CheckpointError:
                continue
