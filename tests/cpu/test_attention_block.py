"""RadixAttentionBlock and its rotary functions: against a loop, itself in parts, and Llama."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ramify
from ramify.attention import RadixAttentionBlock, apply_rotary_pos_emb, rotate_half
from ramify.attention.blocks.rotary import rotary_tables
from ramify.errors import ConfigError
from tests.pure.test_attention_names import loaded_by

HIDDEN, HEADS, DIM, POSITIONS = 48, 4, 16, 64


def block(**changes: Any) -> RadixAttentionBlock:
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": DIM}
    return RadixAttentionBlock(**sizes, max_position_embeddings=POSITIONS, **changes).eval()


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def looped(layer: RadixAttentionBlock, hidden: Tensor, positions: list[int]) -> Tensor:
    """One sequence, [tokens, hidden_size], row by row and number by number in float64."""
    layer = layer.double()
    tokens, half = len(hidden), layer.head_dim // 2
    q, k, v = (
        part(hidden.double()).reshape(tokens, -1, layer.head_dim)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    for at, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position / 10000.0 ** (2 * i / layer.head_dim)).double()
            for x in (q, k):
                a, b = x[at, :, i].clone(), x[at, :, i + half].clone()
                x[at, :, i] = a * angle.cos() - b * angle.sin()
                x[at, :, i + half] = b * angle.cos() + a * angle.sin()
    group = layer.num_heads // layer.num_kv_heads
    mixed = torch.zeros(tokens, layer.num_heads, layer.head_dim, dtype=torch.float64)
    for at in range(tokens):
        for head in range(layer.num_heads):
            scores = k[: at + 1, head // group] @ q[at, head] / layer.head_dim**0.5
            mixed[at, head] = scores.softmax(0) @ v[: at + 1, head // group]
    out: Tensor = layer.o_proj(mixed.flatten(1)).float()
    layer.float()
    return out


# -- what it computes ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shifted", [False, True])
def test_it_computes_what_a_loop_computes(num_kv_heads: int, shifted: bool) -> None:
    """Scores over the past scaled by 1 / sqrt(head_dim), softmax, values; any positions."""
    layer, hidden = block(num_kv_heads=num_kv_heads), states(1, 9)
    positions = [3, 4, 5, 9, 9, 20, 21, 63, 0] if shifted else list(range(9))

    ids = torch.tensor([positions]) if shifted else None
    output, weights, cache = layer(hidden, position_ids=ids, output_attentions=True)

    assert torch.allclose(output[0], looped(layer, hidden[0], positions), atol=1e-5)
    assert cache is None
    assert weights.shape == (1, HEADS, 9, 9)
    assert torch.allclose(weights.sum(-1), torch.ones(1, HEADS, 9))
    assert not weights.triu(1).any()


@torch.no_grad()
def test_eb1_no_token_sees_a_later_one() -> None:
    """Another last token: the outputs before it keep their bits."""
    layer, hidden = block(), states(2, 12)
    changed = hidden.clone()
    changed[:, -1] += 1.0

    before, after = layer(hidden)[0], layer(changed)[0]

    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * 10, [4, 1, 5], [9, 1], [3, 7]])
def test_eb2_in_parts_is_what_it_is_at_once(parts: list[int]) -> None:
    """Token by token or in chunks, positions given or not: each new one is turned by its own."""
    layer, hidden = block(num_kv_heads=2), states(2, 10)
    whole, _, kept = layer(hidden, use_cache=True)

    for told in (True, False):
        past, found, start = None, [], 0
        for length in parts:
            ids = torch.arange(start, start + length)[None] if told else None
            output, _, past = layer(
                hidden[:, start : start + length],
                position_ids=ids,
                past_key_value=past,
                use_cache=True,
            )
            found.append(output)
            start += length
        assert torch.allclose(torch.cat(found, 1), whole, atol=1e-6)
        assert past is not None
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(past, kept, strict=True))
        assert past[0].shape == past[1].shape == (2, 2, 10, DIM)


@torch.no_grad()
def test_eb2_positions_shift_nothing_but_the_rotation() -> None:
    """All positions moved by the same number: the same output; not by the same: another one."""
    layer, hidden = block(), states(1, 6)
    at = torch.arange(6)[None]

    same, moved, spread = (
        layer(hidden, position_ids=ids)[0] for ids in (at, at + 30, torch.flip(at, (1,)))
    )

    assert torch.allclose(same, moved, atol=1e-5)
    assert not torch.allclose(same, spread, atol=1e-3)


# -- masks -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_on_the_left_changes_no_answer(dtype: torch.dtype) -> None:
    """A padded prompt, then a decode step with its past: as alone; padding rows are zeros."""
    layer = block()
    prompt, padding, new = states(1, 5), states(1, 3, seed=1), states(1, 1, seed=2)
    alone, _, past = layer(prompt, use_cache=True)
    wanted = layer(new, past_key_value=past)[0]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).to(dtype)
    ids = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])

    padded, weights, past = layer(
        torch.cat((padding, prompt), 1), mask[:, :8], ids[:, :8], None, True, True
    )
    found = layer(new, mask, ids[:, 8:], past)[0]

    assert torch.allclose(padded[:, 3:], alone, atol=1e-6)
    assert torch.allclose(found, wanted, atol=1e-6)
    assert not padded[:, :3].any()
    assert not weights[..., :3].any()


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("hidden_by", ["bool", "int", "-inf", "least"])
def test_four_dimensional_masks_hide_or_add(heads: int, hidden_by: str) -> None:
    """True, 1, 0.0 show; False, 0, -inf and the least float hide; causality holds besides."""
    layer, hidden = block(), states(2, 6)
    shown = torch.ones(2, heads, 6, 6, dtype=torch.bool)
    shown[0, :, :, 1] = False
    shown[1, :, 4] = False  # a query that sees nothing
    added = {"-inf": -torch.inf, "least": torch.finfo(torch.float32).min}
    mask = shown.int() if hidden_by == "int" else shown
    if hidden_by in added:
        mask = torch.zeros(shown.shape).masked_fill(~shown, added[hidden_by])

    output, weights, _ = layer(hidden, mask, output_attentions=True)

    assert not weights[0, :, :, 1].any()
    assert not weights.triu(1).any()
    assert not output[1, 4].any()
    free = layer(hidden, output_attentions=True)[1]
    assert torch.allclose(weights[1, :, 5], free[1, :, 5])
    rest = free[0, :, 5].clone()
    rest[:, 1] = 0
    assert torch.allclose(weights[0, :, 5], rest / rest.sum(-1, keepdim=True), atol=1e-6)


@torch.no_grad()
def test_an_added_number_is_added() -> None:
    """A float mask is a bias of the scores: log 3 makes a key three times as heavy."""
    layer, hidden = block(), states(1, 4)
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 2] = torch.tensor(3.0).log()

    plain, heavy = (layer(hidden, mask, output_attentions=True)[1] for mask in (None, bias))

    wanted = plain * torch.tensor([1.0, 1.0, 3.0, 1.0])
    assert torch.allclose(heavy, wanted / wanted.sum(-1, keepdim=True), atol=1e-6)


# -- Llama -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_it_is_llamas_attention(num_kv_heads: int, theta: float) -> None:
    """The weights of Hugging Face's module, its masks, its positions: its output and weights."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the oracle")
    config = llama.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=num_kv_heads,
        head_dim=DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    oracle = llama.LlamaAttention(config, 0).eval()
    layer = block(num_kv_heads=num_kv_heads, rope_theta=theta)
    layer.load_state_dict(oracle.state_dict())
    hidden = states(3, 11)
    ids = torch.stack([torch.arange(11), torch.arange(11) + 7, torch.arange(11) * 3])
    causal = torch.full((11, 11), torch.finfo(torch.float32).min).triu(1).expand(3, 1, 11, 11)

    embeddings = llama.LlamaRotaryEmbedding(config)(hidden, ids)
    wanted, weights = oracle(hidden, embeddings, causal)[:2]

    for mask in (None, causal):
        output, found, _ = layer(hidden, mask, ids, output_attentions=True)
        assert torch.allclose(output, wanted, atol=1e-6)
        assert torch.allclose(found, weights, atol=1e-6)
    past, parts = None, []
    for at in range(11):
        output, _, past = layer(
            hidden[:, at : at + 1], None, ids[:, at : at + 1], past, False, True
        )
        parts.append(output)
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-6)


def test_rotate_half_and_the_rotation_are_llamas() -> None:
    """The same numbers as Hugging Face's functions, whose tables are picked before the call."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the oracle")
    cos, sin = rotary_tables(DIM, POSITIONS, 10000.0)
    q, k = torch.randn(2, 4, 7, DIM), torch.randn(2, 1, 7, DIM)
    ids = torch.randint(0, POSITIONS, (2, 7))

    found = apply_rotary_pos_emb(q, k, cos, sin, ids)
    unplaced = apply_rotary_pos_emb(q, k, cos, sin)

    assert torch.equal(
        rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([-3.0, -4, 1, 2])
    )
    assert torch.equal(rotate_half(q), llama.rotate_half(q))
    wanted = llama.apply_rotary_pos_emb(q, k, cos[ids], sin[ids])
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    first = apply_rotary_pos_emb(q, k, cos, sin, torch.arange(7)[None])
    assert all(torch.equal(one, two) for one, two in zip(unplaced, first, strict=True))


# -- misuse and names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_states": states(5)}, r"hidden_states \[5, 48\]"),
        ({"attention_mask": torch.ones(2, 4)}, r"\[2, 4\] must be \[2, 7\]"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "3 tokens of the past and 4 new"),
        ({"position_ids": torch.arange(4)}, r"position_ids \[4\]"),
        ({"position_ids": torch.tensor([[0, 1, 2, 64]])}, r"position 64 is outside 0\.\.63"),
        ({"position_ids": torch.tensor([[0, -1, 2, 3]])}, "position -1"),
        ({"past_key_value": (torch.zeros(2, 4, 3, 8),) * 2}, r"past, 16\]"),
        ({"past_key_value": (torch.zeros(2, 4, 61, DIM),) * 2}, "position 64"),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], told: str) -> None:
    """Shapes, positions and past are checked, with the value and what it must be."""
    past = (torch.zeros(2, HEADS, 3, DIM),) * 2

    with pytest.raises(ConfigError, match=told):
        block()(**{"hidden_states": states(2, 4), "past_key_value": past, **changes})


@pytest.mark.parametrize(
    "changes", [{"num_kv_heads": 3}, {"num_kv_heads": 0}, {"rope_theta": 0.0}, {"head_dim": 7}]
)
def test_sizes_that_cannot_work_are_told(changes: dict[str, Any]) -> None:
    """Heads that do not divide, an odd head, nothing at all."""
    sizes = {"hidden_size": 8, "num_heads": 4, "head_dim": 8}

    with pytest.raises(ConfigError):
        RadixAttentionBlock(**(sizes | changes))


def test_the_tables_are_no_weights() -> None:
    """A checkpoint has four matrices; the class is the one that both packages name."""
    names = {f"{part}_proj.weight" for part in "qkvo"}

    assert set(block().state_dict()) == names
    assert ramify.RadixAttentionBlock is RadixAttentionBlock


def test_what_needs_tensors_loads_torch_and_nothing_that_is_optional() -> None:
    """When it is named; tests/pure/test_attention_names.py says what loads not even that."""
    names = "RadixAttentionBlock, RadixAttentionWithPagedKVCache, select_backend, rotate_half"

    assert loaded_by(f"from ramify.attention import {names}") == {"torch"}
