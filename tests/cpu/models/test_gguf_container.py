"""The GGUF container: what a writer wrote, and damaged headers refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.errors import CheckpointError, ModelError, UnsupportedModelError
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
    assert list(container.metadata["tokenizer.ggml.tokens"]) == ["a", "é", ""]
    assert container.metadata["scores"].tolist() == [0.5, 1.5]
    assert container.metadata["flag"] is True
    first, second = container.tensors["a.weight"], container.tensors["b.weight"]
    assert (first.shape, second.shape, second.kind.name) == ((2, 3), (2, 64), "Q4_0")
    assert first.read_rows().view("<f4").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.read_rows().ravel().tolist() == list(range(72))
    assert second.read_rows(1).ravel().tolist() == list(range(36, 72))


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
            except ModelError:
                continue


def header(
    keys: bytes = b"", infos: bytes = b"", *, num_keys: int = 0, num_tensors: int = 0
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + infos


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = 1 << 62
ALIGNED = key("general.alignment", 4, struct.pack("<I", 32))
# Field that the message names -> file.
DAMAGED: dict[str, bytes] = {
    "magic": b"GGML" + bytes(40),
    "version: expected 2 or 3, found 1": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "version: expected 2 or 3, found a big-endian file": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensor count and key count": header(num_tensors=HUGE),
    "length of key": header(struct.pack("<Q", HUGE), bytes(64), num_keys=1),
    "value type of 'a': expected": header(key("a", 13, bytes(64)), num_keys=1),
    "length of 'a'": header(key("a", 8, struct.pack("<Q", 1 << 31)), bytes(64), num_keys=1),
    "'a': expected 100 bytes or more": header(key("a", 8, struct.pack("<Q", 100)), num_keys=1),
    "count of 'a'": header(key("a", 9, struct.pack("<IQ", 8, 1 << 31)), bytes(64), num_keys=1),
    "'a': expected 8000 bytes or more": header(
        key("a", 9, struct.pack("<IQ", 8, 1000)), bytes(64), num_keys=1
    ),
    "length of a string of 'a'": header(
        key("a", 9, struct.pack("<IQQ", 8, 1, HUGE)), bytes(64), num_keys=1
    ),
    "'a': expected 4000 bytes or more": header(
        key("a", 9, struct.pack("<IQ", 4, 1000)), bytes(64), num_keys=1
    ),
    "value type of 'a': expected 0 to 12, nested": header(
        key("a", 9, struct.pack("<IQ", 9, 1) * 6), bytes(64), num_keys=1
    ),
    "key: expected each name once": header(ALIGNED * 2, bytes(64), num_keys=2),
    "general.alignment: expected a power of two, found 24": header(
        key("general.alignment", 4, struct.pack("<I", 24)), num_keys=1
    ),
    "name of a tensor: expected each name once": header(
        b"", info("t", [8]) * 2 + bytes(64), num_tensors=2
    ),
    "dimensions of 't': expected 1 to 4, found 5": header(
        b"", info("t", [1] * 5) + bytes(64), num_tensors=1
    ),
    "shape of 't'": header(b"", info("t", [0]) + bytes(64), num_tensors=1),
    "product below": header(b"", info("t", [1 << 40, 1 << 40]) + bytes(64), num_tensors=1),
    "type of 't': expected F32": header(b"", info("t", [8], 99) + bytes(64), num_tensors=1),
    "row of 't': expected a multiple of 32": header(
        b"", info("t", [33], 2) + bytes(64), num_tensors=1
    ),
    "offset of 't': expected 0, found 32": header(
        b"", info("t", [8], 0, 32) + bytes(96), num_tensors=1
    ),
    "end of the data of 't'": header(b"", info("t", [1 << 40]) + bytes(64), num_tensors=1),
}


@pytest.mark.parametrize("field", DAMAGED)
def test_damage_is_named(field: str, tmp_path: Path) -> None:
    """The field, what was expected and what was found."""
    path = tmp_path / "m.gguf"
    path.write_bytes(DAMAGED[field])

    with pytest.raises(CheckpointError, match=r"expected .*, found") as caught:
        read_container(path)

    assert field in str(caught.value)


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    """A type of ggml that Ramify does not have is refused by its name."""
    path = tmp_path / "m.gguf"
    path.write_bytes(header(b"", info("t", [256], 16) + bytes(64), num_tensors=1))

    with pytest.raises(UnsupportedModelError, match="IQ2_XXS is not read"):
        read_container(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_bytes_are_read_or_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Headers of random fields, cut and overwritten: a container, or an error of ours."""
    kinds = st.integers(0, 13)
    values = st.binary(max_size=40)
    keys = data.draw(st.lists(st.builds(key, st.text(max_size=8), kinds, values), max_size=4))
    dims = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 64), min_size=1, max_size=5)
    infos = data.draw(
        st.lists(
            st.builds(info, st.text(max_size=8), dims, kinds, st.integers(0, 2**64 - 1)), max_size=3
        )
    )
    raw = bytearray(
        header(b"".join(keys), b"".join(infos), num_keys=len(keys), num_tensors=len(infos))
    )
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=3)
    ):
        raw[at] = value
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]) + data.draw(values))

    try:
        container = read_container(path)
    except ModelError:
        return
    for value in container.metadata.values():
        if not isinstance(value, int | float | str):
            list(value)
    for tensor in container.tensors.values():
        assert tensor.read_rows().nbytes == tensor.num_bytes


def split(path: Path, count: int, change: Callable[[Any, int], None] = lambda *_: None) -> None:
    """Write a file in parts, a tensor in each."""
    for number in range(count):
        part = path.with_name(f"m-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            writer.add_uint32("llama.block_count", 2)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", count)
        change(writer, number)
        writer.add_tensor(f"{number}.weight", np.full(4, number, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def test_parts_are_one_container(tmp_path: Path) -> None:
    """By the name of any of them; metadata of the first, tensors of all."""
    split(tmp_path / "m", 3)

    container = read_container(tmp_path / "m-00002-of-00003.gguf")

    assert container.metadata["llama.block_count"] == 2
    assert [path.name for path in container.files] == [
        f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    rows = [tensor.read_rows().view("<f4")[0, 0] for tensor in container.tensors.values()]
    assert rows == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("m-00001-of-00000.gguf", "part 1 of 0"),
        ("m-00000-of-00003.gguf", "part 0 of 3"),
        ("m-00004-of-00003.gguf", "part 4 of 3"),
        ("n-00001-of-00002.gguf", "1 of 2 parts are missing, the first is n-00002-of-00002.gguf"),
        ("whole.gguf", "expected .0, 1. by its name, found .1, 3."),
        ("o-00001-of-00001.gguf", "expected .0, 1. by its name, found .1, 3."),
    ],
)
def test_wrong_parts_are_refused(name: str, message: str, tmp_path: Path) -> None:
    """Impossible names, missing parts, and parts under another name."""
    split(tmp_path / "m", 3)
    part = (tmp_path / "m-00002-of-00003.gguf").read_bytes()
    (tmp_path / name).write_bytes(part)

    with pytest.raises(CheckpointError, match=message):
        read_container(tmp_path / name)
