"""StarCoder 2: layer norms, biases, an MLP without gate. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import Biases, Family
from ramify.models.configs.fields import ConfigFields


def starcoder2_bias(fields: ConfigFields) -> Biases:
    """`use_bias`: on every linear."""
    bias = fields.flag("use_bias", True)
    return Biases(qkv=bias, o=bias, mlp=bias)


def starcoder2_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """StarCoder 2: layer norms, an MLP without gate."""
    names = WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")
    return DenseVariant(names=names, norm="layer", norm_bias=True, has_gate=False)


STARCODER2 = Family(
    model_type="starcoder2",
    variant=starcoder2_variant,
    biases=starcoder2_bias,
    num_kv_heads=2,
    windows="all",
    eps_field="norm_epsilon",
    eps=1e-5,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    eos_token_id=50_256,
)
