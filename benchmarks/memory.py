"""Resident memory of an engine by stage: imports, weights, kernels, the first answer.

    python benchmarks/memory.py                               135 M parameters like SmolLM2's, random
    python benchmarks/memory.py --model DIR --dtype float32
    python benchmarks/memory.py --maps                        also the largest mappings

The goal is the weights once, the part of the pool that holds K/V, the imports, and 120 MiB.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

MIB = 1 << 20
SCRATCH = Path(__file__).parents[1] / "build" / "bench-models"
SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
ALLOWANCE_MIB = 120


def resident() -> dict[str, int]:
    """Bytes of this process in memory: in all, anonymous, and of files."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    fields = dict(
        line.split(":\t", 1) for line in lines if line.startswith(("VmRSS", "Rss", "VmHWM"))
    )
    return {name: int(value.split()[0]) << 10 for name, value in fields.items()}


def mappings(count: int) -> list[tuple[str, int]]:
    """The mappings with most resident bytes, by file; anonymous memory in one."""
    sizes, name = Counter[str](), ""
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else "anonymous"
        elif line.startswith("Rss:"):
            sizes[name] += int(line.split()[1]) << 10
    return sizes.most_common(count)


def write_model() -> Path:
    """The folder of the random checkpoint; written if it is not there."""
    path = SCRATCH / "smollm2-135m-bfloat16"
    if not (path / "config.json").is_file():
        from ramify.testing import write_tiny_checkpoint

        write_tiny_checkpoint(path, "llama", dtype="bfloat16", tokenizer=False, **SMOLLM2_135M)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint; default: a random one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the first prompt")
    parser.add_argument("--maps", action="store_true", help="list the largest mappings")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    stages = [("Python", resident())]
    import torch  # noqa: F401

    stages.append(("torch", resident()))
    import numba  # noqa: F401
    import tokenizers  # noqa: F401

    from ramify import LLM, SamplingParams

    stages.append(("Numba, tokenizers, ramify", resident()))
    llm = LLM(args.model or write_model(), dtype=args.dtype)
    stages.append(("model loaded", resident()))
    vocab = llm.engine.model_config.vocab_size
    prompt = [1 + at * 7919 % (vocab - 1) for at in range(args.prompt)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    llm.generate(prompt, params)
    stages.append((f"first answer, {args.prompt:,} tokens", resident()))

    weights = llm.engine.num_weight_bytes
    config, stats = llm.engine.config, llm.stats().cache
    num_used = stats.num_pages - stats.free_pages
    pool = num_used * config.page_size * config.token_bytes
    imports, end = stages[2][1]["VmRSS"], stages[-1][1]["VmRSS"]
    goal = weights + pool + imports + ALLOWANCE_MIB * MIB
    if args.json:
        print(json.dumps({"stages": dict(stages), "weights": weights, "pool": pool, "goal": goal}))
        return
    print(f"{'MiB':32}{'resident':>10}{'anonymous':>11}{'of files':>10}{'peak':>8}")
    for stage, sizes in stages:
        columns = (sizes["VmRSS"], sizes["RssAnon"], sizes["RssFile"], sizes["VmHWM"])
        print(
            f"{stage:32}"
            + "{:>10.0f}{:>11.0f}{:>10.0f}{:>8.0f}".format(*(n / MIB for n in columns))
        )
    rest = end - weights - pool - imports
    print(
        f"\nweights once {weights / MIB:.0f}, K/V in use {pool / MIB:.0f}, imports "
        f"{imports / MIB:.0f}, everything else {rest / MIB:.0f} MiB"
    )
    print(f"goal: at most {goal / MIB:.0f} MiB; {'reached' if end <= goal else 'missed'}")
    if args.maps:
        for name, num_bytes in mappings(25):
            print(f"{num_bytes / MIB:>8.1f} MiB  {name}")


if __name__ == "__main__":
    main()
