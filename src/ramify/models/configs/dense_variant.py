"""`DenseVariant`: weight names, norms and order of a layer in which dense families differ. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ramify.models.configs.rope import RopeConfig

# "head": a norm over each head. "width": over all heads of q (or of k) together. "after_rope": over
# each head, after rope.
QkNormForm = Literal["head", "width", "after_rope"]
NormKind = Literal["rms", "layer"]
ActivationName = Literal["silu", "gelu_tanh", "gelu"]
# "parallel": attention and MLP read the same norm, and both are added to the residual.
BlockForm = Literal["sequential", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of the tensors of a layer; None: the family has no such tensor.

    hidden += after_attention(o(attention(qkv(before_attention(hidden)))))
    hidden += after_mlp(down(act(gate(before_mlp(hidden))) * up(before_mlp(hidden))))
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # one name: both in a matrix
    down: str = "mlp.down_proj"


FUSED_QKV = ("self_attn.qkv_proj",)
FUSED_GATE_UP = ("mlp.gate_up_proj",)
LLAMA_NAMES = WeightNames()
POST_NORM_NAMES = WeightNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseVariant:
    """A decoder of the Llama family, but for these differences; the defaults are Llama's."""

    names: WeightNames = LLAMA_NAMES
    block: BlockForm = "sequential"
    norm: NormKind = "rms"
    norm_offset: float = 0.0  # Gemma multiplies by 1 + weight
    norm_bias: bool = False
    activation: ActivationName = "silu"
    has_gate: bool = True  # False: down(act(up(x)))
    qk_norm: QkNormForm | None = None
    qk_norm_kind: NormKind = "rms"
    # Whether each head has a weight of its own: rows of a matrix, or tensors `norms.0`, `norms.1`, ...
    qk_norm_per_head: Literal["matrix", "list"] | None = None
    rope_interleaved: bool = False  # rotary pairs are (0, 1), (2, 3), ..., not half a head apart
    local_rope: RopeConfig | None = None  # of layers with a sliding window; None: as the others
    layers_without_rope: frozenset[int] = frozenset()
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False  # `self_attn.sinks`: a logit per head joins the softmax
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block adds
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None


LLAMA = DenseVariant()
