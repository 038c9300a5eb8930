"""The Triton kernels in the interpreter: the same bits for every partition of rows and keys."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.attention.spec import AttentionSpec
from ramify.attention.staging_buffers import NUM_STAGES, StagingBuffers
from tests.cpu.attention_cases import (
    CPU,
    Step,
    assert_same_bits,
    batch_of,
    planes_of,
    run,
    sharing_rows,
    spec_of,
    step_of,
    triton,
)

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

MLA = {"kind": "mla", "num_heads": 3, "num_kv_heads": 1, "head_dim": 24, "value_dim": 16}
KINDS: dict[str, dict[str, object]] = {
    "gqa": {},
    "mqa, bfloat16, window": {
        "num_heads": 3,
        "num_kv_heads": 1,
        "dtype": torch.bfloat16,
        "windows": (50,),
    },
    "int8": {"kv_dtype": torch.int8, "num_heads": 2, "num_kv_heads": 1},
    "soft_cap": {"soft_cap": 2.0, "num_heads": 3, "num_kv_heads": 1},
    "sinks and window": {"sinks": True, "windows": (50,), "num_heads": 4, "num_kv_heads": 1},
    "mla": MLA,
    "mla, bfloat16": MLA | {"dtype": torch.bfloat16},
    "sparse": {"sparse": True, "num_heads": 2, "num_kv_heads": 1},
}


def exact(kind: str, **changes: object) -> AttentionSpec:
    return spec_of(exact=True, **(KINDS[kind] | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_any_length_gives_the_bits_of_the_whole_prompt(kind: str) -> None:
    """Chunks, drafts, decodes with split keys: the same bits."""
    spec, total = exact(kind), 101
    whole = step_of(spec, [(0, total)])
    rows = [whole.batch.block_table[0].tolist()]
    expected = run(triton(spec), whole)

    for cached, new in ((64, 37), (90, 7), (97, 3), (63, 1), (64, 1), (100, 1)):
        part = whole.take(slice(cached, cached + new), batch_of(spec, [(cached, new)], rows))
        for split in (True, False) if new < 8 else (False,):
            out = run(triton(spec, split=split), part)
            assert_same_bits(out, expected[cached : cached + new])


@pytest.mark.parametrize("kind", KINDS)
def test_other_requests_change_no_bit(kind: str) -> None:
    """Alone or with others, at any index of the tile and the batch."""
    spec = exact(kind)
    shares = [(70, 1), (0, 9), (129, 1), (30, 3)]
    step = step_of(spec, shares)
    together = run(triton(spec), step, padding=2)

    for seq, share in enumerate(shares):
        rows = [page for page in step.batch.block_table[seq].tolist() if page >= 0]
        begin, end = step.batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = step.take(slice(begin, end), batch_of(spec, [share], [rows]))
        assert_same_bits(run(triton(spec), alone), together[begin:end])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sparse"])
def test_reading_a_shared_prefix_once_changes_no_bit(kind: str) -> None:
    """Grouped, ungrouped and unsplit decode; nested sharing; drafts among single tokens."""
    spec = exact(kind)
    shares = [(140, 1), (135, 1), (130, 3), (150, 1), (70, 1)]
    shared = [(-1, 0), (0, 128), (1, 64), (0, 128), (2, 64)]
    lengths = [cached + new for cached, new in shares]
    rows = sharing_rows(lengths, shared, spec.page_size)
    step = step_of(spec, shares, rows=rows, sharing=shared)
    unshared = replace(step, batch=batch_of(spec, shares, rows))
    grouping, plain = triton(spec), triton(spec)
    expected = run(plain, unshared)

    assert_same_bits(run(grouping, step), expected)
    assert_same_bits(run(triton(spec, split=False), unshared), expected)

    items = [len(backend.plan(case.batch).arrays["decode_items"].nonzero()) for backend, case in
             ((grouping, step), (plain, unshared))]  # fmt: skip
    assert items[0] < items[1]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_pages_change_no_bit(kind: str) -> None:
    """Pages of 1, 3, 16 or 64 tokens, anywhere, with anything in their unused slots."""
    noise = torch.Generator().manual_seed(5)
    shares, outputs = [(75, 1), (0, 5)], []
    lengths = [76, 5]
    tokens: dict[str, list[Tensor]] = {}
    for page_size in (1, 3, 16, 64):
        spec = exact(kind, page_size=page_size)
        step = step_of(spec, shares, seed=page_size)
        planes = planes_of(spec, _rows(step), lengths, noise)
        for seq, length in enumerate(lengths):
            slots = torch.from_numpy(step.batch.kv_slots(seq))
            for name, plane in planes.items():
                by_seq = tokens.setdefault(name, [])
                if len(by_seq) == seq:
                    by_seq.append(torch.randn(length, *plane.shape[2:], generator=noise))
                plane.flatten(0, 1)[slots] = by_seq[seq]
        q = torch.linspace(-1, 1, step.q.numel()).view_as(step.q)
        outputs.append(run(triton(spec), Step(step.batch, q, planes, None)))

    for out in outputs[1:]:
        assert_same_bits(out, outputs[0])


def _rows(step: Step) -> list[list[int]]:
    return [[page for page in row if page >= 0] for row in step.batch.block_table.tolist()]


def test_buffers_of_a_plan_keep_their_addresses() -> None:
    """A CUDA graph holds pointers: steps of the same signature reuse every buffer in place."""
    spec = exact("gqa")
    rows = [list(range(20)), list(range(20, 40))]
    backend = triton(spec)

    def planned(cached: int) -> tuple[tuple[int, ...], list[int]]:
        plan = backend.plan(batch_of(spec, [(cached, 1), (cached, 1)], rows))
        tensors = [*plan.arrays.values(), plan.partial_acc, plan.partial_ml]
        return plan.signature, [tensor.data_ptr() for tensor in tensors]

    planned(159)  # the largest step first, as for a CUDA graph
    plans = [planned(cached) for cached in (150, 151, 155)]

    assert plans[0] == plans[1] == plans[2]


def test_a_signature_changes_with_the_addresses() -> None:
    """A batch that outgrows the buffers reallocates them and changes the signature."""
    spec = exact("gqa")
    backend = triton(spec)
    small = backend.plan(batch_of(spec, [(8, 1)], [[0, 1]])).signature

    backend.plan(batch_of(spec, [(400, 9)], [list(range(60))]))

    assert backend.plan(batch_of(spec, [(8, 1)], [[0, 1]])).signature != small


class Recorded(TorchDispatchMode):
    """Records the names of all torch operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_pb31_one_upload_per_step_and_ab13_nothing_read_back() -> None:
    """A step's arrays are uploaded in one copy; no tensor value is read back."""
    spec = exact("gqa")
    backend = triton(spec)
    step = step_of(spec, [(100, 1), (0, 30)])
    backend.plan(step.batch)

    with Recorded() as recorded:
        backend.plan(step.batch)

    assert [name for name in recorded.names if "copy" in name] == ["aten.copy_.default"]
    assert not [name for name in recorded.names if "local_scalar" in name or "item" in name]


def test_ab26_a_buffer_being_copied_is_not_overwritten() -> None:
    """Consecutive steps use different host buffers; the device has the last step."""
    arrays = StagingBuffers(CPU)
    steps = [torch.arange(4, dtype=torch.int32).add(10 * n).numpy() for n in range(3)]
    staged = []

    for step in steps:
        uploaded = arrays.upload({"a": step, "last": step})
        staged.append(arrays._host[(arrays._step - 1) % NUM_STAGES].copy())
        assert uploaded["a"][:, 0].tolist() == step.tolist()

    assert arrays._host[0].ctypes.data != arrays._host[1].ctypes.data
    assert (arrays._host[1] == staged[1]).all()  # the third step did not write it


IMPORTS = """
import sys
from ramify.attention import *
import ramify.attention.backend as backend
import torch
spec = backend.AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, page_size=4, windows=(None,),
                             dtype=torch.float32, scale=1.0, exact=False)
backend.select_backend("sdpa", spec, torch.device("cpu"))
print(*sorted({"triton", "flashinfer", "numba"} & set(sys.modules)))
"""


def test_pb29_no_optional_extra_is_loaded_before_it_is_used() -> None:
    """Neither the package, a star import, nor `select_backend` loads an optional extra."""
    process = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False, timeout=120
    )

    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == []
