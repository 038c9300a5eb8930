"""The identity of an engine follows the content of its checkpoint and everything that changes bits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.attention import exactness
from ramify.config import EngineConfig
from ramify.engine.execution.assembly import LocalEngine
from ramify.engine.execution.content_digest import DigestStore, content_digest
from ramify.engine.execution.identity import canonical
from ramify.engine.identity import EngineIdentity
from ramify.errors import CheckpointError
from ramify.kernels.cpu import tile_choice
from ramify.kernels.cpu.abi import BF16, BF16_VNNI
from ramify.testing import write_tiny_checkpoint

OPTIONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"page_size": 8}, ("page_size",)),
    ({"kv_dtype": "int8"}, ("kv_dtype",)),
    ({"exact": False}, ("exact",)),
    (
        {"exact": False, "speculative": "ngram", "speculative_sampling": "rejection"},
        ("exact", "sampling"),
    ),
    ({"ops": "torch"}, ("arithmetic",)),
    ({"quantize": "int8"}, ("weight_types",)),
    ({"dtype": "bfloat16"}, ("weight_types", "kv_dtype", "arithmetic")),
)


def identity(path: Path, **options: Any) -> EngineIdentity:
    requested = EngineConfig.of(model=path, **{"kv_cache_tokens": 256, **options})
    return LocalEngine(requested).identity()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("identity") / "model", "llama")


def test_a_copy_is_the_same_model_and_another_byte_is_not(checkpoint: Path, tmp_path: Path) -> None:
    """The path does not count; one changed byte of a weight does."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    here, there = identity(checkpoint), identity(copy)

    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    assert here == there
    assert here.differing(identity(copy)) == ("weights",)


@pytest.mark.parametrize(("options", "names"), OPTIONS, ids=str)
def test_an_option_that_changes_bits_changes_its_field(
    checkpoint: Path, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Each option differs in the fields that say so, and at least in these."""
    differing = identity(checkpoint).differing(identity(checkpoint, **options))

    assert set(names) <= set(differing)


def test_instructions_that_a_process_has_not_are_part_of_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hypervisor keeps them from a processor, or the system keeps tiles from a process."""
    here, fields = identity(checkpoint), exactness._cpu_fields()
    fewer = fields | {"flags": fields.get("flags", "").replace("avx", "none")}
    monkeypatch.setattr(exactness, "_cpu_fields", lambda: fewer)
    masked = identity(checkpoint)
    monkeypatch.undo()
    other = BF16 if tile_choice.bf16_weight_kind(2) == BF16_VNNI else BF16_VNNI
    monkeypatch.setattr(tile_choice, "bf16_weight_kind", lambda width: other)

    refused = identity(checkpoint)

    assert here.differing(masked) == here.differing(refused) == ("arithmetic",)


@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("function", ["has_avx512", "has_bf16_dot"])
def test_what_kernels_are_compiled_for_is_part_of_it(
    checkpoint: Path, ops: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba's configuration decides it; with torch's operations attention alone depends on it."""
    here = identity(checkpoint, ops=ops, attention_backend="cpu")
    has = getattr(tile_choice, function)()
    monkeypatch.setattr(tile_choice, function, lambda: not has)

    other = identity(checkpoint, ops=ops, attention_backend="cpu")

    assert here.differing(other) == ("arithmetic",)


def test_threads_are_part_of_it(checkpoint: Path) -> None:
    """The number of threads has a field of its own, and no other field has it."""
    here, num_threads = identity(checkpoint), torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads + 1)
        there = identity(checkpoint)
    finally:
        torch.set_num_threads(num_threads)

    assert here.differing(there) == ("threads",)


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    """A second store reads the digest of a file that has not changed, and no other."""
    file, memory = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(b"abc" * 1000)
    digest = DigestStore(memory).digest_of(file)
    (key,) = json.loads(memory.read_text())
    memory.write_text(json.dumps({key: "11" * 32}))

    remembered = DigestStore(memory).digest_of(file)
    file.write_bytes(b"abd" * 1000)
    changed = DigestStore(memory).digest_of(file)

    assert remembered == "11" * 32
    assert changed not in (digest, remembered)
    assert DigestStore(None).digest_of(file) == changed


def test_a_damaged_memory_is_ignored(tmp_path: Path) -> None:
    """Whatever is in the file of digests, the digest is right."""
    file, memory = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(b"abc")
    digest = DigestStore(None).digest_of(file)

    for text in ("", "[]", "{", '{"a": 1}', '{"a": "zz"}', '{"a": "11"}', "\0"):
        memory.write_text(text)

        assert DigestStore(memory).digest_of(file) == digest


def test_chunks_are_in_order(tmp_path: Path) -> None:
    """Two chunks that change places change the digest; so does a chunk that is cut."""
    chunks = [bytes([index]) * (16 << 20) for index in (1, 2)]
    digests = set()
    for name, content in (
        ("a", chunks[0] + chunks[1]),
        ("b", chunks[1] + chunks[0]),
        ("c", (chunks[0] + chunks[1])[:-1]),
    ):
        (tmp_path / name).write_bytes(content)
        digests.add(content_digest([tmp_path / name], DigestStore(None)))

    assert len(digests) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that cannot be read is an error with its name."""
    with pytest.raises(CheckpointError, match="no-such-file cannot be read"):
        content_digest([tmp_path / "no-such-file"], DigestStore(None))


def test_sets_have_one_text() -> None:
    """A set is written in one order, whatever the process's hashes are."""
    assert canonical(frozenset(["b", "a"])) == canonical(frozenset(["a", "b"])) == "{'a', 'b'}"
