"""Ramify beside Hugging Face `generate`: same checkpoint, prompts and dtype, in one run.

    make bench                                   a random Llama of 59 M parameters, float32
    make bench ARGS="--model DIR --dtype bfloat16 --repeats 5"

Workloads: the requests of `cold` share a prefix that the cache does not know; those of `warm` ask
other things about the same prefix afterwards; `no sharing` has as many tokens and nothing in common;
`single` is one request. The engines take turns within each repetition, so that a slow phase of the
machine meets all of them. Ramify also runs with its cache off. Hugging Face keeps nothing between
calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import commit
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging as transformers_logging

import ramify
from ramify import LLM, SamplingParams
from ramify.models.checkpoint.find import find_checkpoint
from ramify.testing import write_tiny_checkpoint

Prompts = list[list[int]]
SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 3584,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a workload, and the number of tokens each request generates."""

    name: str
    prompts: Prompts
    num_new: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One engine's result on one workload. Times in seconds."""

    total_s: float
    ttft_s: float
    hit_rate: float
    tokens: list[list[int]]


def workloads(args: argparse.Namespace, repeat: int, vocab: int) -> list[Workload]:
    """Build the workloads of one repetition: fresh prompts of fixed lengths."""
    rng = random.Random(f"shared prefix {repeat}")

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(count)]

    shared = ids(args.shared)
    cold = [shared + ids(args.own) for _ in range(args.requests)]
    warm = [shared + ids(args.own) for _ in range(args.requests)]
    alone = [ids(args.shared + args.own) for _ in range(args.requests)]
    return [
        Workload("cold", cold, args.new),
        Workload("warm", warm, args.new),
        Workload("no sharing", alone, args.new),
        Workload("single", [ids(args.single)], args.single_new),
    ]


class Ramify:
    """The engine under test; its cache is cleared before every workload but `warm`."""

    def __init__(self, path: str, dtype: str, *, exact: bool, cache: bool) -> None:
        self.name = "ramify" if cache else "cache off"
        self.llm = LLM(path, dtype=dtype, exact=exact, prefix_cache=cache)

    def run(self, workload: Workload) -> Sample:
        if workload.name != "warm":
            self.llm.cache.clear()
        params = SamplingParams(max_tokens=workload.num_new, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(workload.prompts, params)
        total = time.perf_counter() - start
        prompt = sum(output.cache.prompt_tokens for output in outputs)
        computed = sum(output.cache.computed_tokens for output in outputs)
        ttft = median(output.metrics.ttft_s or 0.0 for output in outputs)
        return Sample(
            total, ttft, 1 - computed / prompt, [list(output.token_ids) for output in outputs]
        )


class HuggingFace:
    """transformers' `generate`, one static batch, SDPA attention."""

    name = "transformers"

    def __init__(self, path: str, dtype: str) -> None:
        transformers_logging.set_verbosity_error()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def run(self, workload: Workload) -> Sample:
        ids = torch.tensor(workload.prompts)
        first: list[float] = []
        start = time.perf_counter()

        class FirstToken(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
                first.append(time.perf_counter() - start)
                return torch.zeros(len(ids), dtype=torch.bool)

        output_ids = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=workload.num_new,
            do_sample=False,
            stopping_criteria=[FirstToken()],
        )
        total = time.perf_counter() - start
        return Sample(total, first[0], 0.0, output_ids[:, ids.shape[1] :].tolist())


Turn = dict[str, Sample]  # engine → what it did with one workload in one repetition


@dataclass(frozen=True, slots=True)
class Row:
    """A table row: medians over the repetitions, and the spread of the ratio."""

    workload: str
    ramify_s: float
    cache_off_s: float
    transformers_s: float
    ratio: float  # transformers / ramify, median of the per-repetition ratios
    ratio_min: float
    ratio_max: float
    ramify_ttft_s: float
    transformers_ttft_s: float
    hit_rate: float
    equal_outputs: str


def measure(args: argparse.Namespace, path: str, vocab: int) -> list[Row]:
    """Run all repetitions of all workloads, alternating engines; returns the table's rows."""
    engines = (
        Ramify(path, args.dtype, exact=args.exact, cache=True),
        Ramify(path, args.dtype, exact=args.exact, cache=False),
        HuggingFace(path, args.dtype),
    )
    warm_up = Workload("single", [[5 + at % 97 for at in range(64)]], 4)
    for engine in engines:
        engine.run(warm_up)
    turns_by_workload: dict[str, list[Turn]] = {}
    for repeat in range(args.repeats):
        for workload in workloads(args, repeat, vocab):
            turn: Turn = {}
            for engine in engines if repeat % 2 == 0 else engines[::-1]:
                turn[engine.name] = engine.run(workload)
            turns_by_workload.setdefault(workload.name, []).append(turn)
            times = ", ".join(f"{name} {sample.total_s:.2f} s" for name, sample in turn.items())
            print(f"  {repeat + 1}/{args.repeats} {workload.name}: {times}", flush=True)
    return [_row(name, turns) for name, turns in turns_by_workload.items()]


def _row(name: str, turns: list[Turn]) -> Row:
    ratios = [turn["transformers"].total_s / turn["ramify"].total_s for turn in turns]
    outputs = [
        len({tuple(token_ids) for token_ids in answers}) == 1
        for turn in turns
        for answers in zip(*(sample.tokens for sample in turn.values()), strict=True)
    ]

    def mid(read: Callable[[Turn], float]) -> float:
        return median(map(read, turns))

    return Row(
        workload=name,
        ramify_s=mid(lambda turn: turn["ramify"].total_s),
        cache_off_s=mid(lambda turn: turn["cache off"].total_s),
        transformers_s=mid(lambda turn: turn["transformers"].total_s),
        ratio=median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        ramify_ttft_s=mid(lambda turn: turn["ramify"].ttft_s),
        transformers_ttft_s=mid(lambda turn: turn["transformers"].ttft_s),
        hit_rate=mid(lambda turn: turn["ramify"].hit_rate),
        equal_outputs=f"{sum(outputs)}/{len(outputs)}",
    )


def report(args: argparse.Namespace, rows: list[Row]) -> None:
    """Print the table and the setting it was measured in."""
    print(f"\n{setting(args)}\n")
    print(
        "| workload | ramify s | cache off s | transformers s | transformers / ramify (min–max) "
        "| TTFT ramify / transformers ms | hit rate | equal outputs |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.workload} | {row.ramify_s:.2f} | {row.cache_off_s:.2f} | {row.transformers_s:.2f} "
            f"| {row.ratio:.2f} ({row.ratio_min:.2f}–{row.ratio_max:.2f}) "
            f"| {row.ramify_ttft_s * 1e3:,.0f} / {row.transformers_ttft_s * 1e3:,.0f} "
            f"| {row.hit_rate:.1%} | {row.equal_outputs} |"
        )


def setting(args: argparse.Namespace) -> str:
    """Describe model, dtype, sizes, machine and commit in two lines."""
    return (
        f"{args.model or 'random Llama, 59 M parameters'}, {args.dtype}, exact={args.exact}; "
        f"{args.requests} requests of {args.shared} shared + {args.own} own tokens, {args.new} new; "
        f"single: {args.single} + {args.single_new}; greedy; medians of {args.repeats}\n"
        f"ramify {ramify.__version__} ({commit()}), torch {torch.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint directory; by default a random Llama")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--exact", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024)
    parser.add_argument("--own", type=int, default=32)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--single", type=int, default=2048)
    parser.add_argument("--single-new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if args.model is not None:
            path = str(find_checkpoint(args.model))
        else:
            path = str(
                write_tiny_checkpoint(Path(scratch) / "small", "llama", tokenizer=False, **SMALL)
            )
        vocab = json.loads((Path(path) / "config.json").read_text("utf-8"))["vocab_size"]
        rows = measure(args, path, vocab)
    report(args, rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2), "utf-8")


if __name__ == "__main__":
    main()
