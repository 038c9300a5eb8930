"""How each figure of `gpu_check` is measured: attention alone, engines over a random Llama of 8B.

Those of DeepSeek's shape are in `gpu_deepseek`.

A figure is a function of the checkpoint's folder that returns its value and details; it measures the
device's copy bandwidth and matmul rate itself where its value is a share of them.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_attention import CASES, DTYPE, Case, Limits, Row, measure
from gpu_clock import best_seconds, seconds_per_step
from gpu_deepseek import latent_decode, moe_step, sparse_index
from machine import commit

import ramify
from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint

Figure = Callable[[Path], tuple[float, Mapping[str, Any]]]
LIBRARIES = ("flashinfer", "varlen", "flex")
# Llama 3.1 8B
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
FEW, MANY = 16, 80  # tokens of the two generations whose difference is the decode steps
NUM_STREAMS, STREAM_LEN = 64, 1024
PREFIX_LEN, TAIL_LEN = 16_384, 64


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def setting() -> dict[str, str]:
    """What is needed to read the figures."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        driver = ""
    return {
        "command": f"python benchmarks/gpu_check.py {' '.join(sys.argv[1:])}".strip(),
        "commit": f"ramify {ramify.__version__} ({commit()})",
        "hardware": torch.cuda.get_device_name(device()),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}",
        "model": "a random Llama of the shape of 8B, bfloat16",
    }


def write_checkpoint(path: Path) -> None:
    """Write the random 8B model, 16 GB, unless it is there."""
    if not (path / "config.json").exists():
        write_tiny_checkpoint(
            path, "llama", dtype="bfloat16", shards=8, tokenizer=False, **SHAPE
        )  # fmt: skip


# -- attention -------------------------------------------------------------------------------------


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def attention_row(name: str, backend: str, limits: Limits, *, is_shared: bool = False) -> Row:
    """A row of the attention benchmark.

    Raises:
        RuntimeError: the backend does not support the case.
    """
    row = measure(case(name), backend, False, limits, device(), is_shared=is_shared)
    if isinstance(row, str):
        raise RuntimeError(f"{backend}: {row}")
    return row


def paged_decode(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Share of the copy bandwidth of a decode step's attention."""
    limits = Limits.measured(device())
    row = attention_row("decode, 64 × 4k", "triton", limits)
    return row.copy_share, {"ms": row.ms, "copy_gb_per_s": limits.copy_bytes_per_s / 1e9}


def grouped_decode(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Time without the shared prefix's group, divided by the time with it."""
    limits = Limits.measured(device())
    name = "decode, 64 sharing 16k"
    grouped = attention_row(name, "triton", limits, is_shared=True)
    ungrouped = attention_row(name, "triton", limits)
    return ungrouped.ms / grouped.ms, {"grouped_ms": grouped.ms, "ungrouped_ms": ungrouped.ms}


def extend(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Time of the best library kernel that is installed, divided by ours."""
    limits, name = Limits.measured(device()), "extend, 8 × 512 over 4k"
    ours = attention_row(name, "triton", limits)
    rows = {
        backend: measure(case(name), backend, False, limits, device(), is_shared=False)
        for backend in LIBRARIES
    }
    times = {backend: row.ms for backend, row in rows.items() if isinstance(row, Row)}
    absent = {backend: row for backend, row in rows.items() if isinstance(row, str)}
    if not times:
        raise RuntimeError(f"no library kernel to compare with: {absent}")
    return min(times.values()) / ours.ms, {"triton_ms": ours.ms, "ms": times, "absent": absent}


# -- engines ---------------------------------------------------------------------------------------


def engine(path: Path, **options: Any) -> LLM:
    """An engine over the random model, with room for the largest figure and all that makes it fast."""
    fast: dict[str, Any] = {
        "ops": "triton",
        "attention_backend": "triton",
        "decode_graphs": True,
        "exact": False,
    }
    return LLM(
        path, device="cuda", dtype="bfloat16", **(fast | {"kv_cache_tokens": 160_000} | options)
    )  # fmt: skip


def prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    """Random token ids that share nothing."""
    draw = random.Random(seed)
    return [[draw.randrange(SHAPE["vocab_size"]) for _ in range(length)] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def decode_step(llm: LLM, count: int, length: int) -> float:
    """Seconds of a decode step of `count` requests with prompts of `length` tokens."""
    inputs = prompts(count, length, seed=count)
    return seconds_per_step(lambda n: llm.generate(inputs, greedy(n)), FEW, MANY)


def weight_bytes() -> int:
    """Bytes of the matrices that a decode step reads: all but the embedding."""
    hidden, wide, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 8 * 128
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * wide
    count: int = SHAPE["num_hidden_layers"] * layer + hidden * SHAPE["vocab_size"]
    return count * DTYPE.itemsize


def kv_bytes(num_tokens: int) -> int:
    """Bytes of K/V of so many tokens."""
    count: int = 2 * 8 * 128 * SHAPE["num_hidden_layers"] * num_tokens
    return count * DTYPE.itemsize


def step_roofline(limits: Limits, count: int, length: int) -> float:
    """Seconds of a decode step: its bytes or its arithmetic, whichever takes longer."""
    num_bytes = weight_bytes() + kv_bytes(count * (length + (FEW + MANY) // 2))
    flops = 2.0 * count * weight_bytes() / DTYPE.itemsize
    return max(num_bytes / limits.copy_bytes_per_s, flops / limits.matmul_flops_per_s)


def single_stream(path: Path) -> tuple[float, Mapping[str, Any]]:
    """The roofline of a decode step of one request, divided by its time."""
    limits = Limits.measured(device())
    seconds = decode_step(engine(path), 1, TAIL_LEN)
    bound = step_roofline(limits, 1, TAIL_LEN)
    return bound / seconds, {"ms": seconds * 1e3, "bound_ms": bound * 1e3}


def streams(path: Path) -> tuple[float, Mapping[str, Any]]:
    """Time of a decode step of 64 requests, divided by its roofline."""
    limits = Limits.measured(device())
    seconds = decode_step(engine(path), NUM_STREAMS, STREAM_LEN)
    bound = step_roofline(limits, NUM_STREAMS, STREAM_LEN)
    return seconds / bound, {"ms": seconds * 1e3, "bound_ms": bound * 1e3}


def warm_ttft(path: Path) -> tuple[float, Mapping[str, Any]]:
    """TTFT of a tail on a cached prefix, divided by that of the tail as a prompt."""
    llm, first = engine(path), greedy(1)
    [prefix] = prompts(1, PREFIX_LEN, seed=1)
    tails = iter(prompts(20, TAIL_LEN, seed=2))
    llm.generate([[*prefix, *next(tails)]], first)

    def ask(stem: list[int]) -> Any:
        return llm.generate([[*stem, *next(tails)]], first)

    warm, tail = (best_seconds(partial(ask, stem), repeats=8) for stem in (prefix, []))
    return warm / tail, {"warm_ms": warm * 1e3, "tail_ms": tail * 1e3}


def exact_mode(path: Path) -> tuple[float, Mapping[str, Any]]:
    """Time of prompts and answers with exact=True, divided by that without."""
    seconds = {}
    for is_exact in (False, True):
        llm = engine(path, exact=is_exact)
        inputs = iter(prompts(4 * 8, 2048, seed=3))

        def generate(llm: LLM = llm, inputs: Any = inputs) -> Any:
            return llm.generate([next(inputs) for _ in range(8)], greedy(MANY))

        generate()
        seconds[is_exact] = best_seconds(generate)
        del llm, generate
        torch.cuda.empty_cache()
    return seconds[True] / seconds[False], {"exact_s": seconds[True], "fast_s": seconds[False]}


FIGURES: dict[str, Figure] = {
    "paged-decode": paged_decode,
    "grouped-decode": grouped_decode,
    "extend": extend,
    "single-stream": single_stream,
    "64-streams": streams,
    "warm-ttft": warm_ttft,
    "exact": exact_mode,
    "latent-decode": latent_decode,
    "sparse-index": sparse_index,
    "moe-step": moe_step,
}
NEED_CHECKPOINT = {"single-stream", "64-streams", "warm-ttft", "exact"}
