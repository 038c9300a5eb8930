"""`ModelConfig`: sizes and variant of a decoder, read from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.config_fields import ConfigFields
from ramify.models.deepseek_config import MlaConfig, MoeConfig, rope_settings, yarn_attention_factor

RopeScaling = Literal["default", "linear", "llama3", "dynamic", "yarn"]
DENSE_ROPE_SCALINGS = ("default", "linear", "llama3", "dynamic")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class _FamilyDefaults:
    """Values of an architecture for fields that its `config.json` leaves out."""

    model_type: str
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    is_latent: bool = False  # DeepSeek: MLA, mixture of experts


FAMILIES: dict[str, _FamilyDefaults] = {
    "LlamaForCausalLM": _FamilyDefaults("llama", bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _FamilyDefaults(
        "mistral", num_kv_heads=8, sliding_window=4096, bos_token_id=1, eos_token_id=2
    ),
    "Qwen2ForCausalLM": _FamilyDefaults("qwen2", num_kv_heads=32, sliding_window=4096),
    "Qwen3ForCausalLM": _FamilyDefaults(
        "qwen3", num_kv_heads=32, head_dim=128, sliding_window=4096
    ),
    "DeepseekV2ForCausalLM": _FamilyDefaults(
        "deepseek_v2", bos_token_id=1, eos_token_id=2, is_latent=True
    ),
    "DeepseekV3ForCausalLM": _FamilyDefaults(
        "deepseek_v3", bos_token_id=0, eos_token_id=1, is_latent=True
    ),
    "DeepseekV32ForCausalLM": _FamilyDefaults(
        "deepseek_v32", bos_token_id=0, eos_token_id=1, is_latent=True
    ),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and scaling of its frequencies.

    `dynamic` is computed like `default`: it changes nothing below `original_max_len` tokens, and no
    request gets longer. Frequencies that follow a request's length would also make the keys of a
    shared prefix depend on the request.
    """

    theta: float
    scaling: RopeScaling = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 1.0  # llama3
    original_max_len: int = 0  # llama3, yarn: context length of pre-training
    beta_fast: float = 32.0  # yarn: turns within original_max_len
    beta_slow: float = 1.0  # yarn: the same
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and variant of a decoder.

    With `mla`, `head_dim` is the width of a query head, and `num_kv_heads` equals `num_heads`: the
    K/V cache holds one latent for all heads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_model_len: int  # positions the model supports
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool = False  # on the q, k and v projections
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k
    tie_word_embeddings: bool = False
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    full_attention_layers: frozenset[int] = frozenset()  # layers without sliding_window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None

    def window_of(self, layer: int) -> int | None:
        """Sliding window of this layer in tokens, the query's own included; None: full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a checkpoint of this model by Hugging Face name, in file order."""
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, shape in (self._attention_shapes() | self._mlp_shapes(layer)).items():
                shapes[prefix + name] = shape
            shapes[f"{prefix}input_layernorm.weight"] = (width,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (width,)
        shapes["model.norm.weight"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    def is_float32(self, name: str) -> bool:
        """Whether this tensor stays float32 whatever dtype the model has."""
        return name.endswith((".e_score_correction_bias", ".indexer.weights_proj.weight"))

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.hidden_size
        if self.mla is not None:
            return self.mla.tensor_shapes(width, self.num_heads, bias=self.attention_bias)
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_width, width, self.attention_bias),
            ("self_attn.k_proj", kv_width, width, self.attention_bias),
            ("self_attn.v_proj", kv_width, width, self.attention_bias),
            ("self_attn.o_proj", width, q_width, self.o_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        width, inner = self.hidden_size, self.intermediate_size
        if self.moe is not None and layer not in self.moe.dense_layers:
            return self.moe.tensor_shapes(width)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows, columns in (
            ("mlp.gate_proj", inner, width),
            ("mlp.up_proj", inner, width),
            ("mlp.down_proj", width, inner),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if self.mlp_bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> ModelConfig:
        """Read and check a parsed `config.json`.

        Args:
            config: with the fields of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`)
                or 5 (`rope_parameters`, `dtype`).
            source: file name for error messages.

        Raises:
            UnsupportedModelError: the architecture, or one of its settings, is not supported.
            CheckpointError: a value is missing or contradicts another.
        """
        fields = ConfigFields(config, source)
        architecture = _architecture(fields)
        family = FAMILIES[architecture]
        is_llama, is_qwen3 = family.model_type == "llama", family.model_type == "qwen3"
        activation = config.get("hidden_act") or "silu"
        if activation != "silu":
            raise UnsupportedModelError(
                f"{source}: hidden_act is {activation!r}; only 'silu' is supported"
            )
        if config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{source}: the checkpoint is quantised (quantization_config); only float32, "
                "bfloat16 and float16 weights are supported, so use the original checkpoint"
            )
        hidden_size = fields.count("hidden_size")
        num_heads = fields.count("num_attention_heads")
        num_layers = fields.count("num_hidden_layers")
        num_kv_heads = fields.count("num_key_value_heads", family.num_kv_heads or num_heads)
        if config.get("num_key_value_heads", 0) is None:
            num_kv_heads = num_heads
        mla = MlaConfig.from_hf(fields, family.model_type) if family.is_latent else None
        moe = MoeConfig.from_hf(fields, family.model_type, num_layers) if mla else None
        if mla is not None:
            head_dim = mla.nope_dim + mla.rope_dim
        else:
            head_dim = fields.count("head_dim", family.head_dim or hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{source}: num_attention_heads {num_heads} is no multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        if mla is not None and num_kv_heads != num_heads:
            raise UnsupportedModelError(
                f"{source}: num_key_value_heads {num_kv_heads} beside {num_heads} query heads; "
                "with latent attention every head has its own"
            )
        if mla is None and head_dim % 2:
            raise CheckpointError(f"{source}: head_dim {head_dim} is odd; rotary needs pairs")
        if not config.get("is_causal", True):
            raise UnsupportedModelError(
                f"{source}: is_causal is {config['is_causal']!r}; only causal decoders are supported"
            )
        max_model_len = fields.count("max_position_embeddings")
        window, full_layers = _windows(fields, family, num_layers)
        bias = bool(config.get("attention_bias", False)) and (
            is_llama or is_qwen3 or mla is not None
        )
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.count("intermediate_size"),
            max_model_len=max_model_len,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=_rope(fields, max_model_len, yarn=mla is not None),
            attention_bias=bias or family.model_type == "qwen2",
            o_bias=bias,
            mlp_bias=is_llama and bool(config.get("mlp_bias", False)),
            qk_norm=is_qwen3,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            sliding_window=window,
            full_attention_layers=full_layers,
            bos_token_id=fields.token("bos_token_id", family.bos_token_id),
            eos_token_ids=token_ids(config.get("eos_token_id", family.eos_token_id), source),
            torch_dtype=_dtype(fields),
            mla=mla,
            moe=moe,
        )


def token_ids(value: object, source: str) -> tuple[int, ...]:
    """The token ids of an `eos_token_id` field, which is null, an id or a list of ids.

    Raises:
        CheckpointError: it is anything else.
    """
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise CheckpointError(f"{source}: eos_token_id {value!r} is not a token id or a list")
    return tuple(ids)


def _architecture(fields: ConfigFields) -> str:
    """The first entry of `architectures`, else the architecture of `model_type`."""
    named = fields.config.get("architectures") or []
    if isinstance(named, list | tuple) and named:
        wanted = str(named[0])
        if wanted in FAMILIES:
            kind = fields.config.get("model_type")
            known = [family.model_type for family in FAMILIES.values()]
            if kind in known and kind != FAMILIES[wanted].model_type:
                raise UnsupportedModelError(
                    f"{fields.source}: architectures names {wanted}, but model_type is {kind!r}"
                )
            return wanted
    else:
        wanted = str(fields.config.get("model_type"))
        for architecture, family in FAMILIES.items():
            if family.model_type == wanted:
                return architecture
    raise UnsupportedModelError(
        f"{fields.source}: architecture {wanted} is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _rope(fields: ConfigFields, max_model_len: int, *, yarn: bool) -> RopeConfig:
    """`RopeConfig` from the fields of transformers 4 or 5."""
    config, source = fields.config, fields.source
    settings = rope_settings(fields)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModelError(f"{source}: rotary settings per layer type are not supported")
    for name in ("rope_theta", "partial_rotary_factor"):
        if settings.get(name) is None and config.get(name) is not None:
            settings[name] = config[name]
    if config.get("original_max_position_embeddings") is not None:
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    if settings.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{source}: partial_rotary_factor is {settings['partial_rotary_factor']}; only 1 is "
            "supported"
        )
    kind: Any = settings.get("rope_type") or "default"
    known = get_args(RopeScaling) if yarn else DENSE_ROPE_SCALINGS
    if kind not in known:
        raise UnsupportedModelError(
            f"{source}: rope scaling {kind!r} is not supported; supported are {', '.join(known)}"
        )
    if kind == "yarn" and not settings.get("truncate", True):
        raise UnsupportedModelError(f"{source}: yarn without truncate is not supported")
    rope = ConfigFields(settings, f"{source} (rope)")
    llama3 = kind == "llama3"
    return RopeConfig(
        theta=rope.number("rope_theta", 10000.0),
        scaling=kind,
        factor=1.0 if kind == "default" else rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor") if llama3 else 1.0,
        high_freq_factor=rope.number("high_freq_factor") if llama3 else 1.0,
        original_max_len=rope.count("original_max_position_embeddings", max_model_len),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=yarn_attention_factor(rope) if kind == "yarn" else 1.0,
    )


def _windows(
    fields: ConfigFields, family: _FamilyDefaults, num_layers: int
) -> tuple[int | None, frozenset[int]]:
    """The sliding window in tokens, and the layers that have full attention nevertheless."""
    config = fields.config
    if family.sliding_window is None:
        return None, frozenset()
    if family.model_type == "mistral":
        if "sliding_window" in config and config["sliding_window"] is None:
            return None, frozenset()
        if config.get("layer_types"):
            raise UnsupportedModelError(
                f"{fields.source}: layer_types is not a setting of Mistral models"
            )
        return fields.count("sliding_window", family.sliding_window), frozenset()
    if not config.get("use_sliding_window", False):
        return None, frozenset()
    if "sliding_window" in config and config["sliding_window"] is None:
        return None, frozenset()
    window = fields.count("sliding_window", family.sliding_window)
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise CheckpointError(f"{fields.source}: max_window_layers is {first!r}")
        return window, frozenset(range(min(max(first, 0), num_layers)))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - set(known):
        raise UnsupportedModelError(
            f"{fields.source}: layer_types must name {num_layers} layers, each "
            f"{' or '.join(known)}; it is {kinds!r}"
        )
    return window, frozenset(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _dtype(fields: ConfigFields) -> str:
    """The dtype of the checkpoint's weights; float32 if the configuration does not say."""
    value = fields.config.get("dtype") or fields.config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{fields.source}: dtype {value!r} is not supported; supported are {', '.join(DTYPES)}"
        )
    return name
