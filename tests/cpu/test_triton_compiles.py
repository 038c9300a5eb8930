"""Triton's kernels compile for GPUs that are not there: types, registers, shared memory.

`python -m tests.cpu.test_triton_compiles`, from the root, prints the table of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.cpu.compiled_kernels import (
    ARCHS,
    CASES,
    LAUNCHED,
    MAX_SHARED,
    NOT_ON_AMPERE,
    NUM_REGISTERS,
    Usage,
    compile_cases,
)

pytest.importorskip("triton", reason="the compiler comes with triton")

ROOT = Path(__file__).resolve().parents[2]
# In the default tier: one launch of each kernel, on one architecture.
QUICK = (
    "norm 4096", "silu_mul", "rope, K/V", "gemm", "head gemm, exact", "index, exact", "sampling",
    "attention, exact", "experts, gate and up, exact", "pairs of 32 experts, exact",
)  # fmt: skip


def compile_in_process(archs: Iterable[int], cases: Iterable[str], cache: Path) -> list[Usage]:
    """Compile in a process in which Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.cpu.compiled_kernels", ",".join(map(str, archs)), ";".join(cases)],
        capture_output=True, text=True, check=False, timeout=290, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return [Usage(**json.loads(line)) for line in process.stdout.splitlines()]


def table(usages: Iterable[Usage]) -> str:
    """Markdown: a line for each launch, for each architecture registers × threads and shared memory."""
    by_launch: dict[tuple[str, str, int], list[Usage]] = {}
    seen: dict[tuple[str, str, int], int] = {}
    for usage in usages:
        # a kernel may be launched in two shapes in a case
        of_arch = usage.case, usage.kernel, usage.arch
        seen[of_arch] = seen.get(of_arch, 0) + 1
        by_launch.setdefault((usage.case, usage.kernel, seen[of_arch]), []).append(usage)
    lines = [
        f"| launch | kernel | warps | {' | '.join(f'sm_{arch}' for arch in ARCHS)} |",
        "|---" * (3 + len(ARCHS)) + "|",
    ]
    for (case, kernel, _), launch in by_launch.items():
        cells = {
            usage.arch: f"{usage.registers} regs, {usage.shared:,} B"
            + (f", {usage.spilled} spilled" if usage.spilled else "")
            for usage in launch
        }
        columns = " | ".join(cells.get(arch, "—") for arch in ARCHS)
        lines.append(f"| {case} | `{kernel}` | {launch[0].warps} | {columns} |")
    return "\n".join(lines)


def check(usages: list[Usage]) -> None:
    """No spills, shared memory and registers within those of a thread block, no fusing where exact."""
    print("\n" + table(usages))  # noqa: T201
    for usage in usages:
        assert usage.spilled == 0, usage
        assert usage.shared <= MAX_SHARED[usage.arch], usage
        assert usage.registers * usage.warps * 32 <= NUM_REGISTERS, usage
        # float32 matmuls are chains of fused operations, of one order
        is_exact = "exact" in usage.case and "float32" not in usage.case
        assert not (is_exact and usage.has_fma), usage


def test_every_kernel_compiles(tmp_path: Path) -> None:
    """A launch of each kernel, for a Hopper."""
    usages = compile_in_process([90], QUICK, tmp_path)

    check(usages)
    assert {usage.kernel for usage in usages} == LAUNCHED


@pytest.mark.parametrize("case", CASES)
def test_every_launch_compiles_for_every_architecture(case: str, tmp_path: Path) -> None:
    """Ampere, Hopper and Blackwell."""
    usages = compile_in_process(ARCHS, [case], tmp_path)

    check(usages)
    archs = set(ARCHS) - ({80} if case in NOT_ON_AMPERE else set())
    assert {usage.arch for usage in usages} == archs


if __name__ == "__main__":
    compiled = list(compile_cases(tuple(CASES), ARCHS))
    print(table(compiled))  # noqa: T201
    print(f"\ncompiled in {sum(usage.seconds for usage in compiled):.0f} s")  # noqa: T201
