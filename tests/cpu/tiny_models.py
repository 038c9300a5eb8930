"""Tiny models of every kind of attention, in every dtype and K/V dtype, each loaded once per session."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ramify.attention.backends.blocked import BlockedBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.exactness import ProbeStore
from ramify.models.decoders.decoder import Decoder
from ramify.models.loader import load_model
from ramify.models.ops.registry import OpsFactory
from ramify.models.ops.torch_linear import TORCH_LINEARS, choose_torch_linear, strategy_supports
from ramify.models.ops.torch_ops import TorchOps
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.cpu.engine_cases import LLAMA3_ROPE, Model

# Widths: llama and mistral no multiples of 32, qwen3 only multiples of 32.
DENSE: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 76,
        "intermediate_size": 100,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "vocab_size": 301,
        "rope_scaling": LLAMA3_ROPE,
    },
    "mistral": {
        "hidden_size": 52,
        "intermediate_size": 90,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 18,
        "vocab_size": 299,
        "sliding_window": 70,
    },
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 4, "vocab_size": 310},
    "qwen3": {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 320,
    },
}
# MLA over all keys (v2), and over keys that a sparse index selects (v32); written by transformers.
LATENT = ("v2", "v32")
# Weights rounded at load, and a GGUF file whose matrices have different types.
WEIGHTS = {"weights8": "int8", "weights4": "int4", "gguf": "off"}
WORDS = {"torch", *TORCH_LINEARS, "int8", "fp8", "blocked", *WEIGHTS, "rows8"}
GGUF_TYPES = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1")


class TinyModels:
    """Models by family and variant; their checkpoints are written to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoders: dict[tuple[str, str, str, str, str], Decoder] = {}
        self._models: dict[tuple[str, str], Model] = {}

    def __call__(self, family: str, variant: str) -> Model:
        """A model of two layers.

        Args:
            family: of `DENSE` or `LATENT`.
            variant: a dtype, then any of: `torch` for `TorchOps`, or a linear strategy of it (else the
                operations that users get), `int8` or `fp8` for K/V, `blocked` for torch attention, as
                without Numba; a word of `WEIGHTS`, and `rows8` for activations in int8. For example `float32-onednn-int8`.
        """
        if (family, variant) not in self._models:
            dtype, *words = variant.split("-")
            assert set(words) <= WORDS, f"{variant}: unknown"
            strategy = next((word for word in words if word in TORCH_LINEARS), None)
            weight = torch.zeros(8, 8, dtype=getattr(torch, dtype))
            reason = strategy_supports(strategy, weight) if strategy else None
            if reason is not None:
                pytest.skip(f"no {strategy} linears: {reason}")
            weights = next((word for word in words if word in WEIGHTS), "")
            ops = strategy or ("torch" if "torch" in words else "auto")
            activations = "int8" if "rows8" in words else "int16"
            decoder = self._decoder(family, dtype, ops, weights, activations)
            if strategy is not None:
                _skip_unless_exact(decoder, strategy)
            self._models[family, variant] = Model(
                f"{family}-{variant}",
                decoder,
                kv_dtype=next((word for word in words if word in ("int8", "fp8")), "auto"),
                backend=BlockedBackend if "blocked" in words else CpuBackend,
            )
        return self._models[family, variant]

    def _decoder(
        self, family: str, dtype: str, ops: str, weights: str, activations: str
    ) -> Decoder:
        key = (family, dtype, ops, weights, activations)
        if key not in self._decoders:
            path = self._gguf(family) if weights == "gguf" else self.checkpoint(family)
            quantize = WEIGHTS.get(weights, "off")
            self._decoders[key] = load_model(
                path, dtype=dtype, ops=ops_of(ops), quantize=quantize, activations=activations
            )
        return self._decoders[key]

    def checkpoint(self, family: str) -> Path:
        """Its checkpoint directory."""
        path = self._folder / family
        if not path.exists():
            _write(family, path)
        return path

    def _gguf(self, family: str) -> Path:
        pytest.importorskip("gguf", reason="it writes the file")
        transformers = pytest.importorskip("transformers", reason="it reads the configuration")
        from tests.cpu.models.gguf_files import write_gguf

        path, copy = self._folder / f"{family}.gguf", self._folder / f"{family}-of-gguf"
        if not path.exists():
            shutil.copytree(self.checkpoint(family), copy)
            config = transformers.AutoConfig.from_pretrained(copy)
            write_gguf(family.capitalize(), config, copy, path, types=GGUF_TYPES)
        return path


def ops_of(name: str) -> str | OpsFactory:
    """The `ops` argument of `load_model`: a name of it, or a linear strategy of `TorchOps`."""
    return partial(TorchOps, linear_strategy=name) if name in TORCH_LINEARS else name


def _skip_unless_exact(decoder: Decoder, strategy: str) -> None:
    """Skip where a strategy that nobody probed depends on the number of rows, as oneDNN with AMX does."""
    for forced in decoder.exactness():
        if forced.reason == "forced":
            weight = torch.randn(forced.shape).to(getattr(torch, forced.dtype))
            _, verdict = choose_torch_linear(
                weight, None, exact=True, store=ProbeStore(None), candidates=(strategy,)
            )
            if verdict.strategy != strategy:
                pytest.skip(f"{'x'.join(map(str, forced.shape))}, {verdict.reason}")


def _write(family: str, path: Path) -> None:
    if family in LATENT:
        from tests.cpu.deepseek_cases import save_oracle  # skips where there is no transformers

        experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
        save_oracle(family, path, num_hidden_layers=2, vocab_size=301, **experts)
        return
    write_tiny_checkpoint(
        path, cast(TinyFamily, family), tokenizer=False, num_hidden_layers=2, **DENSE[family]
    )
