"""SmolLM2-135M-Instruct for every server: the published GGUF file, and the same weights in bfloat16."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from engines.contract import AbsentError
from engines.registry import PACKAGED
from engines.smollm2 import write_smollm2

from ramify.engine.text.tokenizer import Tokenizer
from servers.contract import ModelFiles

DTYPE = "bfloat16"


def write_model_files(root: Path, quantize: Path) -> ModelFiles:
    """The model's files below `root`; what is there already is not written again.

    Args:
        quantize: llama.cpp's program, which widens the GGUF file; where it is missing, so is that file.

    Raises:
        AbsentError: the package with the model is not installed.
    """
    folder = write_smollm2(root, DTYPE)
    files = ModelFiles(
        folder / DTYPE, folder / f"{DTYPE}.whole.gguf", folder / f"{DTYPE}-{PACKAGED}.gguf"
    )
    _write_tokenizer(files)
    if quantize.exists() and not files.bf16_file.is_file():
        begun = files.bf16_file.with_suffix(".begun")
        command = [str(quantize), "--allow-requantize", str(files.q4_file), str(begun), "BF16"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise AbsentError(f"llama-quantize failed: {result.stderr.strip()[-200:]}")
        begun.rename(files.bf16_file)
    return files


def _write_tokenizer(files: ModelFiles) -> None:
    """Tokenizer and chat template of the GGUF file, in the files that Hugging Face's libraries read."""
    settings = files.checkpoint / "tokenizer_config.json"
    if settings.is_file():
        return
    tokenizer = Tokenizer.load(files.q4_file)
    (files.checkpoint / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    fields = {
        **tokenizer.special_tokens,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    settings.write_text(json.dumps(fields, indent=2), "utf-8")
