"""Where kernels are kept: what is damaged, locked or full costs a compile, never an answer."""

from __future__ import annotations

import json
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

import llvmlite.binding
import numpy as np
from filelock import FileLock
from numba import float64
from numba.core.caching import FunctionCache

from ramify.kernels.cpu import object_code
from ramify.kernels.cpu.jit import compile_cached
from ramify.kernels.cpu.object_code import MANIFEST, build_facts, object_name, write_object
from ramify.kernels.cpu.targets import shipped_target

SIGNATURE = (float64[::1],)


def _add_one(values: Any) -> None:
    for i in range(len(values)):
        values[i] += 1.0


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An entry point that is compiled nowhere, with a cache of its own on disk."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(object_code, "SHIPPED", tmp_path / "objects")
    object_code.shipped_folder.cache_clear()
    yield lambda: compile_cached(_add_one)
    object_code.shipped_folder.cache_clear()


def runs(entry_point: Any) -> bool:
    """Call it; whether it did what it should."""
    values = np.zeros(3)
    entry_point(values)
    return bool((values == 1.0).all())


def lock_of(entry_point: Any) -> Path:
    return Path(entry_point._cache._lock.lock_file)


def test_what_is_kept_is_loaded(entry: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The second of two that are made in the same way compiles nothing."""
    assert runs(entry())
    caplog.clear()

    assert runs(entry())

    assert "compiling" not in caplog.text


def test_no_code_between_source_and_machine_is_kept(entry: Any) -> None:
    """LLVM IR would be parsed again by every process, and stay in its memory."""
    kept = entry()
    assert runs(kept)

    (file,) = Path(kept._cache.cache_path).glob("*.nbc")
    (_, kind, (code, names)), *_ = pickle.loads(file.read_bytes())

    assert kind == "object"
    assert code.startswith(b"\x7fELF")
    module = llvmlite.binding.parse_bitcode(names)
    assert [sum(1 for _ in function.blocks) for function in module.functions] == [1]


def test_a_lock_that_cannot_be_made_is_no_error(entry: Any) -> None:
    """Such as one of another user in a folder that all may write to."""
    entry_point = entry()
    lock_of(entry_point).mkdir(parents=True)

    assert runs(entry_point)


def test_a_lock_that_is_never_released_is_waited_for_once(
    entry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that was stopped holds it for ever; the kernel is compiled beside it."""
    monkeypatch.setattr(object_code, "MAX_WAIT_S", 0.2)
    entry_point = entry()
    other = FileLock(lock_of(entry_point), thread_local=False)
    held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with other:
            held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with caplog.at_level(logging.WARNING):
            assert runs(entry_point)
    finally:
        is_over.set()
        thread.join()

    assert "another process compiles" in caplog.text
    assert "is not released" in caplog.text


def test_a_full_disk_costs_only_the_next_compile(
    entry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The code is in memory already."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", full)

    assert runs(entry())
    assert "is not kept for other processes: [Errno 28] No space left" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "empty", "manifest"])
def test_damaged_object_code_is_compiled_as_if_there_were_none(
    damage: str, entry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And said, since each process compiles from then on."""
    target = shipped_target()
    if target is None:
        pytest.skip("no object code for this processor")
    built = entry()
    built.compile(SIGNATURE)
    folder, manifest = tmp_path / "objects" / target.name, tmp_path / "objects" / MANIFEST
    folder.mkdir(parents=True)
    write_object(folder, built.py_func.__qualname__, SIGNATURE, built.overloads[SIGNATURE])
    manifest.write_text(json.dumps(build_facts()), encoding="utf-8")
    file = folder / object_name(built.py_func.__qualname__, SIGNATURE)
    data = file.read_bytes()
    if damage == "manifest":
        manifest.write_text('{"numba": ')
    else:
        file.write_bytes({"truncated": data[:-20], "other bytes": b"x" * 99, "empty": b""}[damage])
    object_code.shipped_folder.cache_clear()
    caplog.clear()

    assert runs(entry())

    assert "of this wheel cannot be" in caplog.text
