"""Compare greedy answers to real prompts with transformers, token by token.

    .venv/bin/python scripts/compare_with_transformers.py MODEL [--prompts 50] [--max-tokens 32]

Prompts are pieces of this project's documents, of 20 to 4,000 tokens. For each, Ramify answers cold and
again from the cache; transformers then reads prompt and answer in one pass. A token is right if it has
the largest of transformers' logits, or one within 1e-3 of it. Fails at any other token.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ramify import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TIE = 1e-3


def main() -> None:
    """Compare, print a line for each prompt, exit 1 at a wrong token."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-prompt", type=int, default=4000, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(args.model, dtype="float32")
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        sys.exit(f"error: {args.model} has no tokenizer")
    text = "\n\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids, rng = tokenizer.encode(text), random.Random(0)
    prompts = []
    for number in range(args.prompts):
        length = min(args.max_prompt, int(20 * (args.max_prompt / 20) ** (number / args.prompts)))
        start = rng.randrange(len(ids) - length)
        prompts.append(list(ids[start : start + length]))
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    cold = [llm.generate([prompt], params)[0] for prompt in prompts]
    warm = llm.generate(prompts, params)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    num_wrong = num_ties = 0
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        answer = list(first.token_ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[range(len(answer)), answer]
        wrong = int((gaps > TIE).sum()) + (answer != list(second.token_ids))
        num_wrong, num_ties = num_wrong + wrong, num_ties + int(((gaps > 0) & (gaps <= TIE)).sum())
        print(
            f"prompt {len(prompt):5d}  read {second.cache.read_tokens:5d}  largest gap "
            f"{float(gaps.max()):.1e}  wrong {wrong}",
            flush=True,
        )
    print(f"{len(prompts)} prompts, {num_ties} ties, {num_wrong} wrong tokens or answers")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
