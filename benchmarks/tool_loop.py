"""Tokens that a loop of calls and results computes, with reasoning in the history and without.

    python benchmarks/tool_loop.py                          25 steps, every reasoning family, all APIs
    python benchmarks/tool_loop.py --steps 5 --families qwen3,gpt_oss

The model is scripted: each answer thinks and calls a tool in the family's form, the client sends it back
with a result. `none` is the same loop with the reasoning left out. The server, its cache and the
family's chat template are real, the executor is fake, so a row takes seconds. `new` are the tokens that
the prompts grow by; `over` is the most that a step computes beyond them, and is less than a page where
nothing is computed twice (below 0: tokens of the answer were read too).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise

from arguments import count, names

from tests.pure.tool_loop import PAGE_SIZE, PATHS, REASONING_FAMILIES, LoopStep, run_loop

COLUMNS = [
    (api, has_reasoning)
    for api in PATHS
    for has_reasoning in (True, False)
    if has_reasoning or api != "previous"  # stored items keep their reasoning
]


def over(steps: Sequence[LoopStep]) -> int:
    """The most tokens that a step computes beyond those that its prompt grew by."""
    return max(
        step.num_computed - (len(step.prompt) - len(before.prompt))
        for before, step in pairwise(steps)
    )


def main() -> None:
    """Print a table in Markdown."""
    known = {family.name: family for family in REASONING_FAMILIES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=count, default=25)
    parser.add_argument("--families", type=names(known), default=list(known))
    arguments = parser.parse_args()
    heads = [f"{api}{'' if has_reasoning else ', none'}" for api, has_reasoning in COLUMNS]
    print(f"{arguments.steps} steps, pages of {PAGE_SIZE} tokens\n")
    print("| family | prompts | new | " + " | ".join(heads) + " | over |")
    print("|---|" + "---:|" * (len(heads) + 3))
    for name in arguments.families:
        loops = [
            run_loop(known[name], api, num_steps=arguments.steps, has_reasoning=has_reasoning)
            for api, has_reasoning in COLUMNS
        ]
        prompts = sum(len(step.prompt) for step in loops[0])
        cells = [sum(step.num_computed for step in loop) for loop in loops]
        values = [prompts, len(loops[0][-1].prompt), *cells, max(map(over, loops))]
        print(f"| {name} | " + " | ".join(f"{value:,}" for value in values) + " |", flush=True)


if __name__ == "__main__":
    main()
