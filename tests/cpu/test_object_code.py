"""Object code of kernels: complete, loaded in place of compiling, refused where it does not fit; said on stderr."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ramify

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu import attention_args
from ramify.kernels.cpu.abi import ITEM_BYTES
from ramify.kernels.cpu.attention_args import KVPlane
from ramify.kernels.cpu.entry_points import ENTRY_POINTS, PLANES, ROW_PLANES, signatures
from ramify.kernels.cpu.object_code import MANIFEST, build_facts
from ramify.kernels.cpu.simd import HAS_BF16_DOT
from ramify.kernels.cpu.targets import TARGETS, shipped_target
from ramify.kernels.cpu.threads import KV_KINDS, ROW_KINDS
from tests.cpu.attention_cases import CPU, spec_of, step_of
from tests.cpu.test_compiled_sources import compiled_entries

# Runs an op; prints how many entry points Numba compiled, and the bits of the result. Writes the code that
# it has compiled into a folder, as the build does.
PROGRAM = """
import pathlib, sys
import torch
from numba.core import event
from ramify.kernels.cpu.object_code import write_object
from ramify.kernels.cpu.op_list import run_ops
from ramify.models.ops.cpu.linear import PackedLinear
compiled = []
class Listener(event.Listener):
    def on_start(self, event):
        compiled.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass
event.register("numba:compile", Listener())
torch.manual_seed(0)
out = PackedLinear(torch.randn(40, 30), activation="gelu_tanh")(torch.randn(7, 30))
print(compiled.count("_run_ops"), out.numpy().tobytes().hex())
for types, code in run_ops.overloads.items():
    if "_run_ops" in compiled:
        write_object(pathlib.Path(sys.argv[1]), run_ops.py_func.__qualname__, types, code)
"""


def test_the_table_has_every_entry_point_and_kind_of_plane() -> None:
    """What is added later ships too."""
    entries = [entry.py_func.__name__.strip("_") for entry, _, _ in ENTRY_POINTS]
    kinds: set[Any] = {
        value
        for value in vars(attention_args).values()
        if isinstance(value, type) and issubclass(value, KVPlane) and value is not KVPlane
    }

    assert sorted(entries) == sorted(name for _, name in compiled_entries())
    assert {kind for kind in kinds if HAS_BF16_DOT or not kind.vnni} == {*PLANES}
    assert {plane.kind for plane in PLANES} == {*KV_KINDS.values()} == {*range(len(ITEM_BYTES))}
    assert {plane.kind for plane in ROW_PLANES} == {*ROW_KINDS.values()}
    assert {plane for plane in PLANES if plane.kind in ROW_KINDS.values()} == {*ROW_PLANES}


def test_attention_runs_with_a_signature_of_the_table() -> None:
    """With each kind of planes, in a process of its own: another test may call a kernel with other arguments."""
    program = (
        "from tests.cpu.test_object_code import missing_signatures; print(missing_signatures())"
    )
    folders = [str(Path(ramify.__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.stdout == "[]\n", result.stdout + result.stderr


def missing_signatures() -> list[str]:
    """Run attention over each kind of planes; what was called and is not in the table."""
    from ramify.attention.backends.cpu import CpuBackend

    for kv_dtype in (*KV_KINDS, None):
        for changes in ({}, {"kind": "mla", "num_kv_heads": 1, "head_dim": 24, "value_dim": 16}):
            # Without a K/V dtype: bfloat16 throughout.
            dtype = torch.float32 if kv_dtype else torch.bfloat16
            spec = spec_of(dtype=dtype, kv_dtype=kv_dtype, **changes)
            step = step_of(spec, [(0, 5), (9, 1)])
            backend = CpuBackend(spec, CPU)
            backend.run(backend.plan(step.batch), 0, step.q, step.planes)
    table = {(entry.py_func.__name__, types) for entry, _, types in signatures()}
    used = {
        (entry.py_func.__name__, types) for entry, *_ in ENTRY_POINTS for types in entry.overloads
    }
    assert used, "attention ran without compiled kernels"
    return [f"{name}{types}" for name, types in sorted(used - table, key=str)]


@pytest.mark.skipif(shipped_target() is None, reason="no object code for this processor")
def test_shipped_code_is_loaded_and_has_the_bits_of_compiled_code(tmp_path: Path) -> None:
    """Two processes compile once and say so; another, without their cache, compiles nothing."""
    target = shipped_target()
    assert target is not None
    package = tmp_path / "site" / "ramify"
    shutil.copytree(
        Path(ramify.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__", "objects"),
    )
    objects = package / "kernels" / "cpu" / "objects"

    (objects / target.name).mkdir(parents=True)
    both = [start(tmp_path, "first", str(objects / target.name)) for _ in range(2)]
    results = [process.communicate() for process in both]

    assert [process.returncode for process in both] == [0, 0], results
    counts, bits = zip(*(out.split() for out, _ in results), strict=True)
    said = "".join(err for _, err in results)
    assert sorted(counts) == ["0", "1"] and len({*bits}) == 1
    assert said.count("compiling CPU kernels, once for this machine: 1 of 1") == 1
    assert said.count("compiled in") == 1

    (objects / MANIFEST).write_text(json.dumps(build_facts()), encoding="utf-8")
    out, err = run(tmp_path, "second")

    assert out.split() == ["0", bits[0]] and not err
    assert [path.name[:8] for path in (objects / target.name).iterdir()] == ["run_ops_"]

    (objects / MANIFEST).write_text(json.dumps(build_facts() | {"numba": "0.1"}), encoding="utf-8")
    out, err = run(tmp_path, "first")

    assert out.split() == ["0", bits[0]]  # from the cache on disk
    assert "it was built with numba 0.1, this is" in err


def start(folder: Path, cache: str, *args: str) -> subprocess.Popen[str]:
    """Start `PROGRAM` with the copy of the package and a cache of its own on disk."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / cache)}
    environment["PYTHONPATH"] = str(folder / "site")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, cache: str) -> tuple[str, str]:
    process = start(folder, cache)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def test_targets_go_from_best_to_least() -> None:
    """A machine that runs one of them runs those behind it, and gets the first that it runs."""
    required = [{*target.required} for target in TARGETS]

    assert all(less < more for more, less in itertools.pairwise(required))
