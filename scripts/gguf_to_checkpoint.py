"""Widen a GGUF file to a checkpoint directory: config.json, safetensors, tokenizer and chat template.

    .venv/bin/pip install "ramify[hf]" gguf accelerate
    .venv/bin/python scripts/gguf_to_checkpoint.py model.gguf DIRECTORY [--dtype bfloat16]

Transformers reads the file and dequantises its tensors; what it cannot read, this cannot either. The
weights are the quantised ones, so answers are those of the GGUF file and not of the original model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Convert the file of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    if not args.file.is_file():
        sys.exit(f"error: there is no file {args.file}")
    folder, name = args.file.parent, args.file.name
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype)
    # The tensors are dequantised by now; transformers only remembers where they came from.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(args.directory)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(args.directory)
    num_weights = sum(weight.numel() for weight in model.parameters())
    print(f"{args.directory}: {model.config.model_type}, {num_weights:,} weights in {args.dtype}")


if __name__ == "__main__":
    main()
