"""Check that a transformers model is causal and keeps no state but K/V, so that prefixes can be cached."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ramify.models.configs.model_config import ModelConfig
from ramify.models.hf.config import NO_ATTENTION_INTERFACE, RECURRENT

# Hidden rows of some of the check's tokens, at their own positions or at these.
Run = Callable[[slice, Tensor | None], Tensor]
NUM_TOKENS = 256  # of a check
NUM_DIVISIONS, STEP_SIZES = 3, (1, 2, 3, 5, 8, 13, 21, 34)  # of the same rows into steps


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of the attention function: query [T, heads, head_dim], K and V [T, kv_heads, …]."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    soft_cap: float | None
    sinks: Tensor | None
    is_causal: bool
    mask: Any

    def scaled_query(self, scale: float) -> Tensor:
        """The query for attention that multiplies scores by `scale`."""
        own = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        query = self.query if own == scale else self.query * (own / scale)
        return query.contiguous()


@dataclass(frozen=True, slots=True)
class _SeenMask:
    """What a mask function allows."""

    window: int | None
    problem: str | None


class ProbeAttention:
    """Attends in memory, row by row, and records what the model asks for."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.num_tokens = min(NUM_TOKENS, config.max_model_len)
        self.calls: dict[int, AttentionCall] = {}
        self.num_calls = 0
        self.masks: list[_SeenMask] = []
        self.used_masks: set[int] = set()  # a decoder may make masks that no layer gets
        self.window_of: dict[int, int | None] = {}
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forget the K/V of earlier runs."""
        self._keys.clear()
        self._values.clear()

    def mask(self, *args: Any, **options: Any) -> Tensor:
        """Look at a mask function; returns its number, which comes back as the mask of its layers."""
        function = options.get("mask_function", args[5] if len(args) > 5 else None)
        self.masks.append(_look_at(function, self.config.max_model_len))
        return torch.tensor(len(self.masks) - 1)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the new rows over the K/V of all runs since `reset`."""
        self.calls.setdefault(call.layer, call)
        self.num_calls += 1
        is_number = isinstance(call.mask, Tensor) and call.mask.dim() == 0
        if is_number:
            self.used_masks.add(int(call.mask))
            self.window_of[call.layer] = self.masks[int(call.mask)].window
        elif call.mask is not None:
            self.used_masks.update(range(len(self.masks)))
        for store, new in ((self._keys, call.key), (self._values, call.value)):
            store[call.layer] = torch.cat((store[call.layer], new)) if call.layer in store else new
        keys, values = self._keys[call.layer], self._values[call.layer]
        num_old = len(keys) - len(call.key)
        window = self.config.window_of(call.layer) if call.layer < self.config.num_layers else None
        rows = [
            self._attend_row(
                call, row, keys[: num_old + row + 1], values[: num_old + row + 1], window
            )
            for row in range(len(call.query))
        ]
        return torch.stack(rows)

    def _attend_row(
        self, call: AttentionCall, row: int, keys: Tensor, values: Tensor, window: int | None
    ) -> Tensor:
        if window is not None:
            keys, values = keys[-window:], values[-window:]
        query = call.query[row].float()
        groups = query.shape[0] // keys.shape[1]
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        keys, values = (
            x.float().repeat_interleave(groups, 1).transpose(0, 1) for x in (keys, values)
        )
        scores = (keys * query[:, None]).sum(-1) * scale
        if call.soft_cap is not None:
            scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.float()[:, None]), -1)
        weights = scores.softmax(-1)[:, : keys.shape[1]]
        out: Tensor = (weights[..., None] * values).sum(1)
        return out.to(call.query.dtype)

    def has_exact_rows(self, run: Run, multiple: int) -> bool:
        """Whether a row has the same bits in steps of other sizes, all multiples of a number."""
        num_rows = self.num_tokens // multiple * multiple
        if num_rows <= multiple:
            # Nothing to compare with.
            return False
        self.reset()
        together = run(slice(0, num_rows), None)
        for seed in range(NUM_DIVISIONS):
            self.reset()
            rng = random.Random(seed)  # noqa: S311 - no secret
            parts, end = [], 0
            while end < num_rows:
                begin, end = end, min(end + multiple * rng.choice(STEP_SIZES), num_rows)
                parts.append(run(slice(begin, end), None))
            if not torch.equal(torch.cat(parts), together):
                return False
        return True


def _look_at(function: Any, max_model_len: int) -> _SeenMask:
    """Find out which keys a mask function shows to a late and to a later query."""
    if function is None:
        return _SeenMask(None, None)
    windows = []
    zero = torch.tensor(0)
    for query in (min(max_model_len, 1 << 17) - 1, min(max_model_len, 1 << 17) - 1 - 37):
        keys = torch.arange(query + 2)
        visible = function(zero, zero, torch.tensor(query), keys)
        visible = torch.as_tensor(visible).expand(len(keys))
        if bool(visible[query + 1]):
            return _SeenMask(
                None, "attends to later tokens too (bidirectional); only causal decoders run"
            )
        first = int(visible.nonzero()[0]) if bool(visible.any()) else query
        if not bool(visible[first : query + 1].all()):
            return _SeenMask(None, "masks keys in the middle of a prefix")
        windows.append(None if first == 0 else query + 1 - first)
    if windows[0] != windows[1]:
        return _SeenMask(
            None, "attends in chunks; a cache of prefixes needs full or sliding attention"
        )
    return _SeenMask(windows[0], None)


def check_calls(
    probe: ProbeAttention, config: ModelConfig, *, may_be_recurrent: bool
) -> str | None:
    """The reason why the calls of attention do not fit the K/V pool; None if they do."""
    for number in probe.used_masks or range(len(probe.masks)):
        problem = probe.masks[number].problem
        if problem is not None:
            return problem
    missing = [layer for layer in range(config.num_layers) if layer not in probe.calls]
    if missing and may_be_recurrent:
        return RECURRENT
    if not probe.calls:
        return NO_ATTENTION_INTERFACE
    if missing:
        return (
            f"calls transformers' attention interface in {len(probe.calls)} of {config.num_layers} "
            "layers; the others keep a recurrent state or attend by themselves, which the paged K/V "
            "cannot hold"
        )
    if probe.num_calls != config.num_layers:
        return f"attends {probe.num_calls} times in {config.num_layers} layers"
    for _layer, call in sorted(probe.calls.items()):
        reason = _check_call(call, probe, config)
        if reason is not None:
            return reason
    return None


def _check_call(call: AttentionCall, probe: ProbeAttention, config: ModelConfig) -> str | None:
    """`check_calls` of a layer."""
    layer, expected = call.layer, (config.num_heads, config.num_kv_heads, config.head_dim)
    shape = (call.query.shape[1], call.key.shape[1], call.key.shape[2])
    if call.value.shape != call.key.shape:
        return (
            f"has keys of {shape[2]} and values of {call.value.shape[2]} elements a head in layer "
            f"{layer}; the K/V pool has one size for both"
        )
    if shape != expected:
        return (
            f"has {shape[0]} heads and {shape[1]} K/V heads of {shape[2]} elements in layer "
            f"{layer}; its configuration says {expected[0]}, {expected[1]} and {expected[2]}"
        )
    if (call.sinks is not None) != config.variant.attention_sinks:
        return "has attention sinks in some layers only, or under another name than self_attn.sinks"
    # A mask that the layer gets counts instead, as in transformers.
    if call.mask is None and not call.is_causal:
        return "attends to later tokens too (bidirectional); only causal decoders run"
    if call.soft_cap != config.variant.attention_soft_cap:
        return f"caps scores at {call.soft_cap}; its configuration does not say so"
    window = probe.window_of.get(layer, config.window_of(layer))
    if window != config.window_of(layer) and _cuts(window, config) | _cuts(
        config.window_of(layer), config
    ):
        return (
            f"masks with a window of {window} tokens in layer {layer}; its configuration says "
            f"{config.window_of(layer)}"
        )
    return None


def _cuts(window: int | None, config: ModelConfig) -> bool:
    """Whether a window leaves out anything at all."""
    return window is not None and window < config.max_model_len


def check_results(
    probe: ProbeAttention,
    run: Run,
    hidden: Tensor,
    expected: Tensor | None,
    own_at_positions: Callable[[], Tensor],
    *,
    has_cross_attention: bool,
    dtype: torch.dtype,
) -> str | None:
    """Reason why results with a cached prefix or our attention are not the model's, or None.

    Args:
        probe: our attention of the check; it ran for `hidden`.
        run: gives hidden rows of some of the check's tokens with our attention.
        hidden: rows of the whole check with our attention.
        expected: rows with the model's own attention and positions; None if they cannot be computed.
        own_at_positions: gives rows with the model's own attention at positions 0, 1, 2, ...
        has_cross_attention: the decoder has layers that could attend to an encoder.
        dtype: the model's; the tolerance depends on it.
    """
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    if not bool(hidden.isfinite().all()):
        return "computes numbers that are not finite; its weights or its settings are damaged"
    if expected is not None and not _is_near(hidden, expected, tolerance):
        if _is_near(hidden, own_at_positions(), tolerance):
            return "numbers the positions of a prompt otherwise than 0, 1, 2, ..."
        return (
            "gives other results with paged attention than with its own: its attention reads more "
            "than queries, keys and values"
        )
    probe.reset()
    half = probe.num_tokens // 2
    parts = torch.cat((run(slice(0, half), None), run(slice(half, None), None)))
    if _is_near(parts, hidden, tolerance):
        return None
    probe.reset()
    backwards = torch.arange(probe.num_tokens).flip(0)
    if torch.equal(run(slice(None), backwards), hidden):
        if has_cross_attention:
            return (
                "is the decoder of an encoder-decoder, which numbers tokens by a cache of its own and "
                "ignores position_ids; only causal decoders run"
            )
        return (
            "gives other results with a cached prefix than without: it ignores position_ids, or keeps "
            "state besides K/V"
        )
    return "gives other results with a cached prefix than without: it keeps state besides K/V"


def _is_near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    error = (a.float() - b.float()).abs().max()
    return bool(error <= tolerance * b.float().abs().max())
