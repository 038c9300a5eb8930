"""The least time that a workload can take on a machine: arithmetic or bytes, whichever is more.

Each step is one pass over all weights. Prefill is one step over every token that has to be
computed, a shared prefix counted once; a decode step reads the weights and each live page once,
however many requests share it. Only matmuls and attention count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a dense decoder of the Llama kind computes per token."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From a Hugging Face `config.json`."""
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["intermediate_size"],
            config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matmuls."""
        rows = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden * (rows + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the last matmul, which makes logits."""
        return self.hidden * self.vocab

    @property
    def kv_values(self) -> int:
        """Numbers kept per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def attention_flops(self, num_pairs: int) -> float:
        """FLOPs of `num_pairs` pairs of query row and key, over all heads and layers."""
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * num_pairs


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured: FLOP/s of large matmuls in this dtype, bytes/s read from memory."""

    peak: float
    bandwidth: float
    value_bytes: int  # of a weight, or of one number of K/V


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests that start together: what is cached, what they share, what is their own."""

    cached: int  # tokens per request that need not be computed
    shared: int  # tokens that all have in common, cached or not
    prompt: int  # tokens per request
    num_requests: int
    num_new: int


def seconds(turns: Sequence[Turn], shape: ModelShape, machine: Machine) -> float:
    """The roofline of turns that follow each other."""
    return sum(_turn_seconds(turn, shape, machine) for turn in turns)


def _turn_seconds(turn: Turn, shape: ModelShape, machine: Machine) -> float:
    once = max(0, turn.shared - turn.cached)  # computed by one for all
    own = turn.prompt - max(turn.cached, turn.shared)  # computed by each
    computed = once + turn.num_requests * own
    pairs = _pairs(turn.cached, once) + turn.num_requests * _pairs(turn.prompt - own, own)
    weights = shape.layer_weights + shape.head_weights
    total = max(
        (
            2.0 * computed * shape.layer_weights
            + 2.0 * turn.num_requests * shape.head_weights
            + shape.attention_flops(pairs)
        )
        / machine.peak,
        weights * machine.value_bytes / machine.bandwidth,
    )
    for step in range(1, turn.num_new):
        length = turn.prompt + step
        live = turn.shared + turn.num_requests * (length - turn.shared)
        flops = 2.0 * turn.num_requests * weights + shape.attention_flops(
            turn.num_requests * length
        )
        read = (weights + live * shape.kv_values) * machine.value_bytes
        total += max(flops / machine.peak, read / machine.bandwidth)
    return total


def batch_seconds(
    prompts: Sequence[Sequence[int]], num_new: int, shape: ModelShape, machine: Machine
) -> float:
    """The roofline of requests that start together with nothing cached, whatever prefixes they share.

    Args:
        prompts: token ids; what two of them have in common from the first token on is computed once.
        num_new: tokens of each answer.
    """
    rows = pairs = 0
    before: Sequence[int] = ()
    for prompt in sorted(map(tuple, prompts)):
        shared = next(
            (at for at, ids in enumerate(zip(before, prompt, strict=False)) if ids[0] != ids[1]),
            min(len(before), len(prompt)),
        )
        own = max(1, len(prompt) - shared)  # the last token is computed always: it makes the logits
        rows, pairs = rows + own, pairs + _pairs(len(prompt) - own, own)
        before = prompt
    weights, count = shape.layer_weights + shape.head_weights, len(prompts)
    total = max(
        (
            2.0 * (rows * shape.layer_weights + count * shape.head_weights)
            + shape.attention_flops(pairs)
        )
        / machine.peak,
        weights * machine.value_bytes / machine.bandwidth,
    )
    for step in range(1, num_new):
        length = sum(map(len, prompts)) + count * step
        flops = 2.0 * count * weights + shape.attention_flops(length)
        read = (weights + (rows + count * step) * shape.kv_values) * machine.value_bytes
        total += max(flops / machine.peak, read / machine.bandwidth)
    return total


def _pairs(before: int, count: int) -> int:
    """Query rows × keys of `count` causal rows after `before` others."""
    return count * before + count * (count + 1) // 2
