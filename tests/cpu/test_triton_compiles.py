"""The Triton kernels compile for real GPUs, on a machine without: types and shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the compiler comes with triton")

# The backend's own launch, with the compiler instead of the launcher.
COMPILE = """
import sys
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ramify.kernels.triton import paged_attention
from ramify.attention.spec import AttentionSpec
from ramify.attention.backends.triton import TritonBackend
from tests.cpu.attention_cases import batch_of, planes_of, spec_of

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
         torch.uint8: "u8", torch.int32: "i32"}
ARCH, SHARED = int(sys.argv[1]), int(sys.argv[2])

class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self.launch
    def launch(self, *args, num_warps=4, num_stages=3, enable_fp_fusion=True, **constants):
        names = self.kernel.arg_names
        signature, aligned = {}, {}
        for index, (name, value) in enumerate(zip(names, args)):
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + NAMES[value.dtype]
                aligned[index,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
        signature |= dict.fromkeys(constants, "constexpr")
        signature = {name: signature[name] for name in names}
        source = ASTSource(self.kernel, signature, constants, aligned)
        options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=enable_fp_fusion)
        compiled = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
        assert compiled.metadata.shared <= SHARED, (constants, compiled.metadata.shared)
        if not enable_fp_fusion:
            assert "fma.rn.f32" not in compiled.asm["ptx"] or constants["TYPE"] == paged_attention.tl.float32
        print(constants.get("BLOCK_M"), compiled.metadata.shared)

paged_attention.paged_attention = Compiled(paged_attention.paged_attention)
paged_attention.merge_split_kv = Compiled(paged_attention.merge_split_kv)
WIDE = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=16)
for changes in eval(sys.argv[3]):
    spec = spec_of(**(WIDE | changes))
    backend = TritonBackend(spec, torch.device("cpu"), saturating_programs=1 << 20)
    backend._interpreted = False
    rows = [list(range(64))]
    for cached, new in ((1000, 1), (0, 200)):
        batch = batch_of(spec, [(cached, new)], [rows[0][: -(-(cached + new) // 16)]])
        planes = planes_of(spec, rows, [1000], torch.Generator())
        q = torch.zeros(new, spec.num_heads, spec.head_dim, dtype=spec.dtype)
        selected = torch.zeros(new, 64, dtype=torch.int32) if spec.sparse else None
        backend.run(backend.plan(batch), 0, q, planes, selected=selected)
"""
BF16 = "'dtype': torch.bfloat16"
MLA = "'kind': 'mla', 'num_heads': 16, 'num_kv_heads': 1, 'head_dim': 576, 'value_dim': 512"
CASES = {
    "exact": f"{{'exact': True, {BF16}}}, {{'exact': True}}",
    "free": f"{{{BF16}, 'windows': (100,), 'soft_cap': 30.0}}, {{}}",
    "head dims": f"{{{BF16}, 'head_dim': 80}}, {{{BF16}, 'head_dim': 256, 'exact': True}}",
    "scales": f"{{{BF16}, 'kv_dtype': torch.int8}}, "
    f"{{{BF16}, 'kv_dtype': torch.float8_e4m3fn, 'exact': True}}",
    "mla": f"{{{BF16}, {MLA}, 'exact': True}}, {{{BF16}, {MLA}, 'sparse': True}}",
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_a_hopper(case: str, tmp_path: Path) -> None:
    """Every launch of a decode step and of a chunk fits the shared memory of a thread block."""
    _compile(90, 227 << 10, CASES[case], tmp_path)


def test_kernels_compile_for_an_ampere(tmp_path: Path) -> None:
    """Compute capability 8.0, the oldest that `supports` accepts."""
    _compile(80, 163 << 10, CASES["exact"], tmp_path)


def _compile(arch: int, shared: int, changes: str, cache: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{root / 'src'}:{root}"}

    process = subprocess.run(
        [sys.executable, "-c", COMPILE, str(arch), str(shared), f"[{changes}]"],
        capture_output=True, text=True, check=False, timeout=280, env=environment,
    )  # fmt: skip

    assert process.returncode == 0, process.stderr[-3000:]
    assert len(process.stdout.splitlines()) >= 3
