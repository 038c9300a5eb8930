"""Checks of a transformers model: do prefixes of it mean the same whatever follows them?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ramify.models.config import ModelConfig

Run = Callable[[slice], Tensor]
NUM_TOKENS = 256  # of a check
NUM_DIVISIONS, STEP_SIZES = 3, (1, 2, 3, 5, 8, 13, 21, 34)  # of the same rows into steps


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function; query [T, heads, head_dim], key and value [T, kv_heads, …]."""

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
            self.window_of[call.layer] = self.masks[int(call.mask)].window
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
        weights = scores.softmax(-1)
        out: Tensor = (weights[..., None] * values).sum(1)
        return out.to(call.query.dtype)

    def has_exact_rows(self, run: Run, multiple: int) -> bool:
        """Whether a row has the same bits in steps of other sizes, all multiples of a number."""
        num_rows = self.num_tokens // multiple * multiple
        if num_rows <= multiple:
            # Nothing to compare with.
            return False
        self.reset()
        together = run(slice(0, num_rows))
        for seed in range(NUM_DIVISIONS):
            self.reset()
            rng = random.Random(seed)  # noqa: S311 - no secret
            parts, end = [], 0
            while end < num_rows:
                begin, end = end, min(end + multiple * rng.choice(STEP_SIZES), num_rows)
                parts.append(run(slice(begin, end)))
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


def check_calls(probe: ProbeAttention, config: ModelConfig) -> str | None:
    """Why the calls of attention do not fit the K/V pool; None if they do."""
    for mask in probe.masks:
        if mask.problem is not None:
            return mask.problem
    missing = [layer for layer in range(config.num_layers) if layer not in probe.calls]
    if missing:
        return (
            f"calls transformers' attention interface in {len(probe.calls)} of {config.num_layers} "
            "layers; the others keep a recurrent state or attend by themselves, which the paged K/V "
            "cannot hold"
        )
    if probe.num_calls != config.num_layers:
        return f"attends {probe.num_calls} times in {config.num_layers} layers"
    expected = (config.num_heads, config.num_kv_heads, config.head_dim)
    for layer, call in sorted(probe.calls.items()):
        shape = (call.query.shape[1], call.key.shape[1], call.key.shape[2])
        if shape != expected or call.value.shape != call.key.shape:
            return (
                f"has {shape[0]} heads, {shape[1]} K/V heads with keys of {shape[2]} and values of "
                f"{call.value.shape[2]} elements in layer {layer}; its configuration says {expected}"
            )
        if call.sinks is not None:
            return "has attention sinks, which the adapter does not hand to attention"
        if not call.is_causal:
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
    probe: ProbeAttention, run: Run, hidden: Tensor, expected: Tensor | None, *, dtype: torch.dtype
) -> str | None:
    """Why results with a cached prefix, or with our attention, are not the model's; None if they are."""
    tolerance = 2e-3 if dtype == torch.float32 else 0.1
    if expected is not None and not _is_near(hidden, expected, tolerance):
        return (
            "gives other results with paged attention than with its own: its attention reads more "
            "than queries, keys and values"
        )
    probe.reset()
    half = probe.num_tokens // 2
    parts = torch.cat((run(slice(0, half)), run(slice(half, None))))
    if not _is_near(parts, hidden, tolerance):
        return (
            "gives other results with a cached prefix than without: it keeps state besides K/V, or "
            "positions are not what it reads"
        )
    return None


def _is_near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    error = (a.float() - b.float()).abs().max()
    return bool(error <= tolerance * b.float().abs().max())
