"""Compile the launches of Triton's kernels for GPUs that need not be there, and read what they use.

    python -m tests.cpu.compiled_kernels [ARCH,...] [CASE,...]

prints a line of JSON for each kernel and architecture; the functions that launch a kernel are called
with the compiler in the launcher's place, so that its real constants are compiled. Needs a process
of its own, in which Triton does not interpret.
"""

# triton has no types
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
ARCHS = (80, 90, 100)
# Bytes of shared memory that a thread block can have, and registers of a multiprocessor.
MAX_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
NUM_REGISTERS = 1 << 16
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
    torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel uses."""

    case: str
    kernel: str
    arch: int
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a thread block
    seconds: float  # to compile
    has_fma: bool  # whether a multiplication and an addition of floats were fused


class Compiler:
    """Stands in for a kernel: compiles it for each launch instead of launching it."""

    def __init__(self, kernel: Any, case: str, arch: int, usages: list[Usage]) -> None:
        self._kernel, self._case, self._arch, self._usages = kernel, case, arch, usages

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, **keywords: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        names, signature, attributes = self._kernel.arg_names, {}, {}
        for index, (name, value) in enumerate(zip(names, args, strict=False)):
            if isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                attributes[index,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        signature |= dict.fromkeys(keywords, "constexpr")
        signature = {name: signature[name] for name in names}
        source = ASTSource(self._kernel, signature, keywords, attributes)
        start = time.perf_counter()
        compiled = triton.compile(source, target=GPUTarget("cuda", self._arch, 32), options=options)
        seconds = time.perf_counter() - start
        registers, spilled = _resources(compiled.asm["cubin"])
        self._usages.append(
            Usage(
                self._case, self._kernel.__name__, self._arch, compiled.metadata.num_warps,
                registers, spilled, compiled.metadata.shared, round(seconds, 2),
                "fma.rn.f32" in compiled.asm["ptx"],
            )
        )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills to local memory."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert usage is not None, text
    return int(usage[1]), int(usage[2]) + int(usage[3])


@contextmanager
def compiler_for(module: ModuleType, case: str, arch: int, usages: list[Usage]) -> Iterator[None]:
    """Put compilers in the place of a module's kernels that it launches."""
    from triton.runtime.jit import JITFunction

    kernels = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name in LAUNCHED
    }
    for name, kernel in kernels.items():
        setattr(module, name, Compiler(kernel, case, arch, usages))
    try:
        yield
    finally:
        for name, kernel in kernels.items():
            setattr(module, name, kernel)


LAUNCHED = {
    "paged_attention", "merge_split_kv", "add_rms_norm_rows", "gated_activation_rows",
    "rope_and_write_kv", "batch_invariant_gemm", "merge_splits", "sample_rows", "top_logprobs",
    "batch_invariant_head_gemm", "index_scores_of_tiles", "grouped_gemm", "list_pairs", "count_pairs",
    "place_pairs", "sum_pairs_of_rows",
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def attention(arch: int, **changes: object) -> None:
    """A decode step with split keys, and a chunk."""
    from ramify.attention.backends.triton import TileShapes, TritonBackend
    from tests.cpu.attention_cases import batch_of, planes_of, spec_of

    base: dict[str, object] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    spec = spec_of(**(base | {"dtype": BF16} | changes))
    tiles = TileShapes.of(spec, (arch // 10, arch % 10))
    backend = TritonBackend(spec, CPU, tiles=tiles, saturating_programs=1 << 20)
    backend._interpreted = False
    pages = list(range(64))
    planes = planes_of(spec, [pages], [1000], torch.Generator())
    sinks = torch.zeros(spec.num_heads) if spec.sinks else None
    for cached, new in ((1000, 1), (0, 200)):
        batch = batch_of(spec, [(cached, new)], [pages[: -(-(cached + new) // 16)]])
        q = torch.zeros(new, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        selected = torch.zeros(new, 64, dtype=torch.int32) if spec.sparse else None
        backend.run(backend.plan(batch), 0, q, planes, selected=selected, sinks=sinks)


def norm(width: int, dtype: torch.dtype) -> None:
    from ramify.kernels.triton.norm import add_rms_norm

    rows = empty(2, width, dtype=dtype)
    add_rms_norm(rows, empty(width, dtype=dtype), 1e-5, 1.0, rows.clone())


def activation(kind: str) -> None:
    """Of dense layers and of experts."""
    from ramify.kernels.triton.activation import gated_activation

    for experts in (None, empty(2, dtype=torch.int32)):
        gated_activation(empty(2, 2 * 14336), kind, alpha=1.7, limit=7.0, experts=experts)


def rope(kv_dtype: torch.dtype, *, is_normed: bool) -> None:
    from ramify.kernels.triton.rope_kv import HeadNorms, rope_kv

    planes = {name: empty(4, 16, 8, 128, dtype=kv_dtype) for name in ("k", "v")}
    planes |= {f"{name}_scale": empty(4, 16, 8, dtype=FP32) for name in ("k", "v")}
    at = torch.zeros(2, dtype=torch.int64)
    norms = HeadNorms(empty(128), empty(128), 1e-6) if is_normed else None
    table = empty(64, 64), empty(64, 64)
    rope_kv(empty(2, 48 * 128), (32, 8), at, table, at, planes, norms)


def gemm(dtype: torch.dtype) -> None:
    """With as few tiles as programs, and with more."""
    from ramify.kernels.triton.gemm import BatchInvariantGemm

    for num_programs in (1, 1000):
        bound = BatchInvariantGemm(empty(4096, 4096, dtype=dtype), num_programs=num_programs)
        bound(empty(16, 4096, dtype=dtype), residual=empty(16, 4096, dtype=dtype))


def head_gemm(dtype: torch.dtype) -> None:
    """W_UK and W_UV of DeepSeek-V3, views of one matrix."""
    from ramify.kernels.triton.head_gemm import HeadGemm

    whole = empty(128, 256, 512, dtype=dtype)
    HeadGemm(whole[:, :128])(empty(40, 128, 128, dtype=dtype))
    HeadGemm(whole[:, 128:].transpose(1, 2))(empty(40, 128, 512, dtype=dtype))


def grouped(dtype: torch.dtype, *, is_down: bool) -> None:
    """Gate and up, or down with a bias, of DeepSeek-V3's experts, of which few are there."""
    from ramify.kernels.triton.expert_pairs import ExpertPairs
    from ramify.kernels.triton.gemm import GemmTiles
    from ramify.kernels.triton.grouped_gemm import GroupedGemm

    experts, rows = empty(4, 8, dtype=torch.int32), GemmTiles.of(dtype).rows
    blocks = empty(2, rows, dtype=torch.int32), empty(2, dtype=torch.int32)
    pairs = ExpertPairs(experts, empty(4, 8, dtype=FP32), *blocks)
    if is_down:
        down = GroupedGemm(empty(2, 7168, 2048, dtype=dtype), empty(2, 7168, dtype=dtype))
        down(empty(32, 2048, dtype=dtype), pairs, pairs_per_row=1)
    else:
        gate_up = GroupedGemm(empty(2, 4096, 7168, dtype=dtype))
        gate_up(empty(4, 7168, dtype=dtype), pairs, pairs_per_row=8)


def pairs_of_experts(num_experts: int, top_k: int) -> None:
    from ramify.kernels.triton.expert_pairs import sort_pairs, sum_pairs

    pairs = sort_pairs(empty(4, num_experts, dtype=FP32), top_k, 64)
    sum_pairs(empty(4 * top_k, 7168), pairs)


def index(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """The index of DeepSeek-V3.2."""
    from ramify.kernels.triton import index_scores

    planes = {"index_key": empty(64, 16, 128, dtype=kv_dtype)}
    if kv_dtype.itemsize == 1:
        planes["index_key_scale"] = empty(64, 16, dtype=FP32)
    index_scores.index_scores(
        empty(16, 64, 128, dtype=dtype), empty(16, 64, dtype=FP32), planes,
        empty(16, 1024, dtype=FP32), items=empty(1, 4, dtype=torch.int32),
        positions=empty(16, 1, dtype=torch.int32),
        block_table=empty(1, 64, dtype=torch.int32), page_size=16, first_row=0,
    )  # fmt: skip


def sampling(_: int) -> None:
    from ramify.kernels.triton.sample_batch import SampleBatch, SampleRow, likeliest

    vocab_size = 128_256
    logits = empty(1, vocab_size, dtype=FP32)
    sampled = SampleBatch.of([SampleRow(0)], vocab_size, CPU).sample(logits)
    likeliest(logits, torch.zeros(1, dtype=torch.int32), sampled.log_sums, 5)


MLA: dict[str, Any] = {
    "kind": "mla", "num_heads": 16, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512,
}  # fmt: skip
ATTENTION: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "exact, float32": {"exact": True, "dtype": FP32},
    "free": {},
    "free, float32": {"dtype": FP32},
    "window and cap": {"windows": (100,), "soft_cap": 30.0},
    "sinks and window, exact": {"windows": (128,), "sinks": True, "exact": True},
    "head_dim 80": {"head_dim": 80},
    "head_dim 256": {"head_dim": 256},
    "head_dim 256, exact": {"head_dim": 256, "exact": True},
    "int8 K/V": {"kv_dtype": torch.int8},
    "float8 K/V, exact": {"kv_dtype": torch.float8_e4m3fn, "exact": True},
    "mla, expanded": {"num_heads": 8, "num_kv_heads": 8, "head_dim": 192, "value_dim": 128},
    "mla, exact": MLA | {"exact": True},
    "mla": MLA,
    "mla, int8": MLA | {"kv_dtype": torch.int8},
    "mla, float8, exact": MLA | {"kv_dtype": torch.float8_e4m3fn, "exact": True},
    "mla, float32, exact": MLA | {"dtype": FP32, "exact": True},
    "mla, sparse": MLA | {"sparse": True},
    "mla, sparse, exact": MLA | {"sparse": True, "exact": True},
}
# name → module of the kernels, and what launches them as for an architecture
CASES: dict[str, tuple[str, Callable[[int], None]]] = {
    "norm 4096": ("norm", lambda _: norm(4096, BF16)),
    "norm 16384, float32": ("norm", lambda _: norm(16384, FP32)),
    "silu_mul": ("activation", lambda _: activation("silu_mul")),
    "gelu_tanh_mul": ("activation", lambda _: activation("gelu_tanh_mul")),
    "gelu_mul": ("activation", lambda _: activation("gelu_mul")),
    "clamped_swiglu_mul": ("activation", lambda _: activation("clamped_swiglu_mul")),
    "rope, K/V": ("rope_kv", lambda _: rope(BF16, is_normed=False)),
    "QK norm, rope, int8 K/V": ("rope_kv", lambda _: rope(torch.int8, is_normed=True)),
    "rope, float8 K/V": ("rope_kv", lambda _: rope(torch.float8_e4m3fn, is_normed=False)),
    "gemm": ("gemm", lambda _: gemm(BF16)),
    "gemm, float32": ("gemm", lambda _: gemm(FP32)),
    "head gemm, exact": ("head_gemm", lambda _: head_gemm(BF16)),
    "head gemm, exact, float32": ("head_gemm", lambda _: head_gemm(FP32)),
    **{
        f"experts, {name}, exact{', float32' * (dtype == FP32)}": (
            "grouped_gemm",
            partial(lambda _, **sizes: grouped(**sizes), dtype=dtype, is_down=name == "down"),
        )
        for name in ("gate and up", "down")
        for dtype in (BF16, FP32)
    },
    "pairs of 256 experts, exact": ("expert_pairs", lambda _: pairs_of_experts(256, 8)),
    "pairs of 32 experts, exact": ("expert_pairs", lambda _: pairs_of_experts(32, 4)),
    "index, exact": ("index_scores", lambda _: index(BF16, BF16)),
    "index, exact, float32": ("index_scores", lambda _: index(FP32, FP32)),
    "index, int8": ("index_scores", lambda _: index(BF16, torch.int8)),
    "index, float8": ("index_scores", lambda _: index(BF16, torch.float8_e4m3fn)),
    "sampling": ("sample_batch", sampling),
    **{
        f"attention, {name}": ("paged_attention", partial(attention, **changes))
        for name, changes in ATTENTION.items()
    },
}
# The conversion from float8_e4m3fn needs compute capability 8.9; `TritonBackend.supports` says so.
NOT_ON_AMPERE = {
    "attention, float8 K/V, exact", "attention, mla, float8, exact", "index, float8"
}  # fmt: skip


def compile_cases(names: tuple[str, ...], archs: tuple[int, ...]) -> Iterator[Usage]:
    """Compile the kernels of some cases for some architectures."""
    from importlib import import_module

    for name in names:
        module, launch = CASES[name]
        kernels = import_module(f"ramify.kernels.triton.{module}")
        for arch in archs:
            if arch == 80 and name in NOT_ON_AMPERE:
                continue
            usages: list[Usage] = []
            with compiler_for(kernels, name, arch, usages):
                launch(arch)
            yield from usages


def main() -> None:
    archs = tuple(map(int, sys.argv[1].split(","))) if len(sys.argv) > 1 else ARCHS
    names = tuple(sys.argv[2].split(";")) if len(sys.argv) > 2 else tuple(CASES)
    for usage in compile_cases(names, archs):
        print(json.dumps(asdict(usage)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
