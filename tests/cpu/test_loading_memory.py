"""Loading takes little more memory than the weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.testing import write_tiny_checkpoint

PEAK = """
import gc, sys
from pathlib import Path
from ramify.models.loader import load_model

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

model, ops = Path(sys.argv[1]), sys.argv[2]
load_model(model, dtype="float32", ops=ops)  # compiles kernels, which takes memory of its own
gc.collect()
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
decoder = load_model(model, dtype="float32", ops=ops)
print(status("VmHWM") - before)
"""


def write_large_checkpoint(path: Path, *, shards: int = 1) -> int:
    """Write 200 MiB of weights and more without a tokenizer; returns their bytes."""
    write_tiny_checkpoint(
        path,
        "llama",
        tokenizer=False,
        shards=shards,
        hidden_size=768,
        intermediate_size=2304,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_hidden_layers=14,
        vocab_size=4096,
    )
    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert num_bytes > 200 << 20
    return num_bytes


def peak_of_loading(path: Path, ops: str, program: str = PEAK) -> int:
    """Bytes that become resident while a process loads a checkpoint in float32, at most at once."""
    run = subprocess.run(
        [sys.executable, "-c", program, str(path), ops],
        capture_output=True,
        text=True,
        # glibc maps tensors of more than 32 MiB, as real models have, and returns them when they are
        # freed. It keeps smaller ones, in heaps whose size varies from run to run.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
@pytest.mark.parametrize("ops", ["cpu", "torch"])
def test_peak_memory_is_that_of_the_weights(ops: str, tmp_path: Path) -> None:
    """Loading takes at most 1.2 times the bytes of the weights, packed copies included."""
    if ops == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    num_bytes = write_large_checkpoint(tmp_path, shards=3)

    assert peak_of_loading(tmp_path, ops) <= 1.2 * num_bytes
