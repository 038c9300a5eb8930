"""RadixAttentionBlock and rotary functions against a loop, themselves in parts, and Llama."""

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
    """The layer over [tokens, hidden_size], row by row in float64."""
    layer = layer.double()
    tokens, half = len(hidden), layer.head_dim // 2
    q, k, v = (
        projection(hidden.double()).reshape(tokens, -1, layer.head_dim)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    for row, position in enumerate(positions):
        for i in range(half):
            angle = torch.tensor(position / 10000.0 ** (2 * i / layer.head_dim)).double()
            for x in (q, k):
                a, b = x[row, :, i].clone(), x[row, :, i + half].clone()
                x[row, :, i] = a * angle.cos() - b * angle.sin()
                x[row, :, i + half] = b * angle.cos() + a * angle.sin()
    group = layer.num_heads // layer.num_kv_heads
    attended = torch.zeros(tokens, layer.num_heads, layer.head_dim, dtype=torch.float64)
    for row in range(tokens):
        for head in range(layer.num_heads):
            scores = k[: row + 1, head // group] @ q[row, head] / layer.head_dim**0.5
            attended[row, head] = scores.softmax(0) @ v[: row + 1, head // group]
    out: Tensor = layer.o_proj(attended.flatten(1)).float()
    layer.float()
    return out


# -- what it computes ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shifted", [False, True])
def test_it_computes_what_a_loop_computes(num_kv_heads: int, shifted: bool) -> None:
    """Scores scaled by 1 / sqrt(head_dim), softmax, values; any positions."""
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
    """A changed last token leaves the bits of the outputs before it."""
    layer, hidden = block(), states(2, 12)
    changed = hidden.clone()
    changed[:, -1] += 1.0

    before, after = layer(hidden)[0], layer(changed)[0]

    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("parts", [[1] * 10, [4, 1, 5], [9, 1], [3, 7]])
def test_eb2_parts_equal_one_call(parts: list[int]) -> None:
    """Token by token or in chunks, with and without `position_ids`."""
    layer, hidden = block(num_kv_heads=2), states(2, 10)
    whole, _, whole_cache = layer(hidden, use_cache=True)

    for with_ids in (True, False):
        past, outputs, start = None, [], 0
        for length in parts:
            ids = torch.arange(start, start + length)[None] if with_ids else None
            output, _, past = layer(
                hidden[:, start : start + length],
                position_ids=ids,
                past_key_value=past,
                use_cache=True,
            )
            outputs.append(output)
            start += length
        assert torch.allclose(torch.cat(outputs, 1), whole, atol=1e-6)
        assert past is not None
        for actual, expected in zip(past, whole_cache, strict=True):
            assert torch.allclose(actual, expected, atol=1e-6)
        assert past[0].shape == past[1].shape == (2, 2, 10, DIM)


@torch.no_grad()
def test_eb2_only_relative_positions_matter() -> None:
    """Shifting all positions equally leaves the output; permuting them changes it."""
    layer, hidden = block(), states(1, 6)
    positions = torch.arange(6)[None]

    plain, shifted, flipped = (
        layer(hidden, position_ids=ids)[0]
        for ids in (positions, positions + 30, torch.flip(positions, (1,)))
    )

    assert torch.allclose(plain, shifted, atol=1e-5)
    assert not torch.allclose(plain, flipped, atol=1e-3)


# -- masks -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_on_the_left_changes_no_output(dtype: torch.dtype) -> None:
    """A padded prompt, then a decode with its past, equal the unpadded; padding rows are zeros."""
    layer = block()
    prompt, padding, new = states(1, 5), states(1, 3, seed=1), states(1, 1, seed=2)
    alone, _, past = layer(prompt, use_cache=True)
    expected = layer(new, past_key_value=past)[0]
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).to(dtype)
    ids = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])

    padded, weights, past = layer(
        torch.cat((padding, prompt), 1), mask[:, :8], ids[:, :8], None, True, True
    )
    output = layer(new, mask, ids[:, 8:], past)[0]

    assert torch.allclose(padded[:, 3:], alone, atol=1e-6)
    assert torch.allclose(output, expected, atol=1e-6)
    assert not padded[:, :3].any()
    assert not weights[..., :3].any()


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("masked_by", ["bool", "int", "-inf", "least"])
def test_four_dimensional_masks_mask_or_add(heads: int, masked_by: str) -> None:
    """True, 1, 0.0 leave keys visible; False, 0, -inf, the smallest float mask; always causal."""
    layer, hidden = block(), states(2, 6)
    visible = torch.ones(2, heads, 6, 6, dtype=torch.bool)
    visible[0, :, :, 1] = False
    visible[1, :, 4] = False  # a query without a visible key
    biases = {"-inf": -torch.inf, "least": torch.finfo(torch.float32).min}
    mask = visible.int() if masked_by == "int" else visible
    if masked_by in biases:
        mask = torch.zeros(visible.shape).masked_fill(~visible, biases[masked_by])

    output, weights, _ = layer(hidden, mask, output_attentions=True)

    assert not weights[0, :, :, 1].any()
    assert not weights.triu(1).any()
    assert not output[1, 4].any()
    unmasked = layer(hidden, output_attentions=True)[1]
    assert torch.allclose(weights[1, :, 5], unmasked[1, :, 5])
    expected = unmasked[0, :, 5].clone()
    expected[:, 1] = 0
    expected /= expected.sum(-1, keepdim=True)
    assert torch.allclose(weights[0, :, 5], expected, atol=1e-6)


@torch.no_grad()
def test_a_float_mask_is_a_bias() -> None:
    """A bias of log 3 gives a key three times the weight, before normalisation."""
    layer, hidden = block(), states(1, 4)
    bias = torch.zeros(1, 1, 4, 4)
    bias[..., 2] = torch.tensor(3.0).log()

    plain, biased = (layer(hidden, mask, output_attentions=True)[1] for mask in (None, bias))

    expected = plain * torch.tensor([1.0, 1.0, 3.0, 1.0])
    assert torch.allclose(biased, expected / expected.sum(-1, keepdim=True), atol=1e-6)


# -- Llama -----------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_it_is_llamas_attention(num_kv_heads: int, theta: float) -> None:
    """Equals Hugging Face's module with its weights, masks and positions."""
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
    expected, expected_weights = oracle(hidden, embeddings, causal)[:2]

    for mask in (None, causal):
        output, weights, _ = layer(hidden, mask, ids, output_attentions=True)
        assert torch.allclose(output, expected, atol=1e-6)
        assert torch.allclose(weights, expected_weights, atol=1e-6)
    past, parts = None, []
    for token in range(11):
        new = slice(token, token + 1)
        output, _, past = layer(hidden[:, new], None, ids[:, new], past, False, True)
        parts.append(output)
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-6)


def test_rotary_functions_equal_llamas() -> None:
    """The same values as Hugging Face's functions, which take the gathered table rows."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the oracle")
    cos, sin = rotary_tables(DIM, POSITIONS, 10000.0)
    q, k = torch.randn(2, 4, 7, DIM), torch.randn(2, 1, 7, DIM)
    ids = torch.randint(0, POSITIONS, (2, 7))

    rotated = apply_rotary_pos_emb(q, k, cos, sin, ids)
    without_ids = apply_rotary_pos_emb(q, k, cos, sin)

    assert torch.equal(
        rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([-3.0, -4, 1, 2])
    )
    assert torch.equal(rotate_half(q), llama.rotate_half(q))
    expected = llama.apply_rotary_pos_emb(q, k, cos[ids], sin[ids])
    for actual, wanted in zip(rotated, expected, strict=True):
        assert torch.equal(actual, wanted)
    in_order = apply_rotary_pos_emb(q, k, cos, sin, torch.arange(7)[None])
    for actual, wanted in zip(without_ids, in_order, strict=True):
        assert torch.equal(actual, wanted)


# -- misuse and names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_wrong_arguments_are_config_errors(changes: dict[str, Any], message: str) -> None:
    """Shapes, positions and past are checked; the message has the value and the limit."""
    past = (torch.zeros(2, HEADS, 3, DIM),) * 2

    with pytest.raises(ConfigError, match=message):
        block()(**{"hidden_states": states(2, 4), "past_key_value": past, **changes})


@pytest.mark.parametrize(
    "changes", [{"num_kv_heads": 3}, {"num_kv_heads": 0}, {"rope_theta": 0.0}, {"head_dim": 7}]
)
def test_impossible_sizes_are_config_errors(changes: dict[str, Any]) -> None:
    """Heads that do not divide, an odd head_dim, a zero."""
    sizes = {"hidden_size": 8, "num_heads": 4, "head_dim": 8}

    with pytest.raises(ConfigError):
        RadixAttentionBlock(**(sizes | changes))


def test_the_rotary_tables_are_not_in_the_state_dict() -> None:
    """The state dict has four matrices only; both packages export the same class."""
    names = {f"{part}_proj.weight" for part in "qkvo"}

    assert set(block().state_dict()) == names
    assert ramify.RadixAttentionBlock is RadixAttentionBlock


def test_names_that_need_tensors_load_torch_and_no_optional_library() -> None:
    """tests/pure/test_attention_names.py has the names that do not even load torch."""
    names = "RadixAttentionBlock, RadixAttentionWithPagedKVCache, select_backend, rotate_half"

    assert loaded_by(f"from ramify.attention import {names}") == {"torch"}
