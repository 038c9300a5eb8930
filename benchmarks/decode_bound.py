"""One request's decode beside what reading its weights and K/V alone takes, in turns.

    python benchmarks/decode_bound.py                                 M in bfloat16 after 2,048 tokens
    python benchmarks/decode_bound.py --model S --dtype float32 --rounds 20

The bound is a step's bytes over the rate at which a sum reads memory. That rate changes on a machine
with neighbours, so each round measures it before and after decoding and takes the larger. Printed are
the medians, with the smallest and the largest round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
from engines.models import DTYPES, MODELS, TITLES, VALUE_BYTES, shape_of, write_model
from engines.peaks import Peaks
from machine import commit

from ramify import LLM, SamplingParams

FEW, MANY = 4, 36  # new tokens; their difference in time leaves out prefill and start
SCRATCH = Path(__file__).parents[1] / "build" / "bench-models"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="M")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens before the first new one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    llm = LLM(write_model(SCRATCH, args.model, args.dtype) / args.dtype, dtype=args.dtype)
    vocab = MODELS[args.model]["vocab_size"]
    prompt = random.Random(0).choices(range(3, vocab), k=args.prompt)
    shape, length = shape_of(args.model), args.prompt + (FEW + MANY) / 2
    values = shape.layer_weights + shape.head_weights + length * shape.kv_values
    num_bytes = values * VALUE_BYTES[args.dtype]

    def seconds(num_new: int) -> float:
        start = time.perf_counter()
        params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
        llm.generate(prompt, params)
        return time.perf_counter() - start

    def rate() -> float:
        return Peaks(args.threads).read()

    seconds(FEW)
    steps, rates, shares = list[float](), list[float](), list[float]()
    for _ in range(args.rounds):
        before = rate()
        steps.append((seconds(MANY) - seconds(FEW)) / (MANY - FEW))
        rates.append(max(before, rate()))
        shares.append(num_bytes / rates[-1] / steps[-1])
        print(
            f"  {1e3 * steps[-1]:.1f} ms a token, {rates[-1] / 1e9:.1f} GB/s: {shares[-1]:.0%}",
            flush=True,
        )
    print(
        f"{TITLES[args.model]}, {args.dtype}, {args.prompt} tokens before, {args.threads} threads, "
        f"{commit()}: {1e3 * statistics.median(steps):.1f} ms a token, "
        f"{num_bytes / 1e6:.0f} MB at {statistics.median(rates) / 1e9:.1f} GB/s; "
        f"{statistics.median(shares):.0%} of the bound ({min(shares):.0%} to {max(shares):.0%}, "
        f"{args.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
