"""`ModelConfig`: sizes and variant of a decoder, read from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.dense_variant import LLAMA, DenseVariant
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.families.deepseek import MlaConfig
from ramify.models.configs.family import Family, read_windows
from ramify.models.configs.fields import (
    MAX_LAYERS,
    MAX_PARTS,
    MAX_POSITIONS,
    ConfigFields,
    is_token_id,
    shown,
)
from ramify.models.configs.moe import MoeConfig
from ramify.models.configs.quantization.config import QuantizationConfig, read_quantization
from ramify.models.configs.rope import (
    NO_ROPE,
    RopeConfig,
    context_len,
    layer_type_settings,
    read_rope,
    rope_settings,
)

DTYPES = ("float32", "bfloat16", "float16")


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
    max_model_len: int  # tokens that the model can read, with its scaled positions
    rms_norm_eps: float  # of layer norms too
    rope: RopeConfig
    variant: DenseVariant = LLAMA
    attention_bias: bool = False  # on the q, k and v projections
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    full_attention_layers: frozenset[int] = frozenset()  # layers without sliding_window
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    # Weights of the same model may be stored in another way.
    quantization: QuantizationConfig | None = field(default=None, compare=False)
    wrapper: str | None = None  # architecture of the whole, of which this is the text decoder
    is_native: bool = True  # False: transformers' own modules compute it (`models/hf/decoder.py`)

    @property
    def default_model_len(self) -> int:
        """`max_model_len`; without the part that changes the answers to short prompts too."""
        is_dynamic = self.rope.scaling == "dynamic"
        return self.rope.original_max_len if is_dynamic else self.max_model_len

    def at_context(self, num_tokens: int) -> ModelConfig:
        """The model of an engine for contexts of `num_tokens`; see `RopeConfig.at_context`."""
        return replace(self, rope=self.rope.at_context(num_tokens, self.head_dim))

    def window_of(self, layer: int) -> int | None:
        """Sliding window of this layer in tokens, the query's own included; None: full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has a mixture of experts in place of an MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def rope_of(self, layer: int) -> RopeConfig:
        """Rotary embedding of this layer."""
        if layer in self.variant.layers_without_rope:
            return NO_ROPE
        is_local = self.window_of(layer) is not None and self.variant.local_rope is not None
        return self.variant.local_rope if is_local and self.variant.local_rope else self.rope

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that a decoder binds by Hugging Face name, in file order."""
        return self._shapes(self._mlp_shapes)

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes in a checkpoint's files, where the experts of a layer may be stacked or packed."""
        return self._shapes(self._stored_mlp_shapes)

    def _shapes(
        self, mlp_shapes: Callable[[int], dict[str, tuple[int, ...]]]
    ) -> dict[str, tuple[int, ...]]:
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, shape in (self._attention_shapes() | mlp_shapes(layer)).items():
                shapes[prefix + name] = shape
            shapes |= {prefix + name: shape for name, shape in self._norm_shapes()}
        shapes["model.norm.weight"] = (width,)
        if self.variant.norm_bias:
            shapes["model.norm.bias"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    def is_float32(self, name: str) -> bool:
        """Whether this tensor stays float32 whatever dtype the model has."""
        return name.endswith(
            (".e_score_correction_bias", ".indexer.weights_proj.weight", ".self_attn.sinks")
        )

    def is_packed(self, name: str) -> bool:
        """Whether this tensor of a checkpoint holds bytes of a quantised one."""
        is_mxfp4 = self.moe is not None and self.moe.expert_format == "mxfp4"
        return is_mxfp4 and name.endswith(("_blocks", "_scales"))

    def _norm_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        names = self.variant.names
        for name in (
            names.before_attention,
            names.after_attention,
            names.before_mlp,
            names.after_mlp,
        ):
            if name is not None:
                yield f"{name}.weight", (self.hidden_size,)
                if self.variant.norm_bias:
                    yield f"{name}.bias", (self.hidden_size,)

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        width, names = self.hidden_size, self.variant.names
        if self.mla is not None:
            return self.mla.tensor_shapes(width, self.num_heads, bias=self.attention_bias)
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}
        heights = [q_width, kv_width, kv_width]
        if len(names.qkv) == 1:
            heights = [sum(heights)]
        for name, rows in zip(names.qkv, heights, strict=True):
            shapes |= _linear_shapes(name, rows, width, bias=self.attention_bias)
        shapes |= _linear_shapes(names.o, width, q_width, bias=self.o_bias)
        if self.variant.attention_sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        heads = {names.q_norm: self.num_heads, names.k_norm: self.num_kv_heads}
        for name, num_heads in heads.items() if self.variant.qk_norm is not None else ():
            shapes |= self._qk_norm_shapes(name, num_heads)
        return shapes

    def _qk_norm_shapes(self, name: str, num_heads: int) -> dict[str, tuple[int, ...]]:
        variant = self.variant
        if variant.qk_norm == "width":
            return {f"{name}.weight": (num_heads * self.head_dim,)}
        if variant.qk_norm_per_head == "matrix":
            return {f"{name}.weight": (num_heads, self.head_dim)}
        if variant.qk_norm_per_head == "list":
            return {f"{name}.norms.{head}.weight": (self.head_dim,) for head in range(num_heads)}
        return {f"{name}.weight": (self.head_dim,)}

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        width, inner, names = self.hidden_size, self.intermediate_size, self.variant.names
        if self.moe is not None and self.has_experts(layer):
            return self.moe.tensor_shapes(width)
        is_fused = self.variant.has_gate and len(names.gate_up) == 1
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names.gate_up:
            rows = 2 * inner if is_fused else inner
            shapes |= _linear_shapes(name, rows, width, bias=self.mlp_bias)
        return shapes | _linear_shapes(names.down, width, inner, bias=self.mlp_bias)

    def _stored_mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        if self.moe is not None and self.has_experts(layer):
            return self.moe.stored_shapes(self.hidden_size)
        return self._mlp_shapes(layer)

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
        hidden_size = fields.count("hidden_size")
        num_heads = fields.count("num_attention_heads", limit=MAX_PARTS)
        num_layers = fields.count("num_hidden_layers", limit=MAX_LAYERS)
        num_kv_heads = fields.count("num_key_value_heads", family.num_kv_heads or num_heads)
        if config.get("num_key_value_heads", 0) is None:
            num_kv_heads = num_heads
        mla = MlaConfig.from_hf(fields, family.model_type) if family.is_latent else None
        moe = family.experts(fields, num_layers)
        quantization = _quantization(fields, moe)
        num_parts = max(num_heads, moe.num_experts if moe is not None else 0)
        if num_layers * num_parts > MAX_PARTS:
            raise CheckpointError(
                f"{source}: num_hidden_layers {num_layers} with {num_parts} heads or experts each have "
                f"{num_layers * num_parts} together; they must have at most {MAX_PARTS}"
            )
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
        if not fields.flag("is_causal", True):
            raise UnsupportedModelError(
                f"{source}: is_causal is {config['is_causal']}; only causal decoders are supported"
            )
        max_model_len = fields.count("max_position_embeddings", limit=MAX_POSITIONS)
        window, full_layers = read_windows(fields, family, num_layers)
        activation = _activation(fields, family)
        if moe is not None and activation != "silu":
            raise UnsupportedModelError(
                f"{source}: {family.activation_field} is {config[family.activation_field]!r}; "
                "experts have only silu"
            )
        variant = replace(family.variant(fields, num_layers), activation=activation)
        if not family.full_attention_rope and window is not None:
            variant = replace(variant, layers_without_rope=full_layers)
        rope, local_rope = _ropes(fields, family, head_dim, max_model_len)
        biases = family.biases(fields)
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=fields.count(family.intermediate_field),
            max_model_len=context_len(fields, max_model_len),
            rms_norm_eps=fields.number(family.eps_field, family.eps),
            rope=rope,
            variant=replace(variant, local_rope=local_rope),
            attention_bias=biases.qkv,
            o_bias=biases.o,
            mlp_bias=biases.mlp,
            tie_word_embeddings=fields.flag("tie_word_embeddings", family.tie_word_embeddings),
            sliding_window=window,
            full_attention_layers=full_layers,
            eos_token_ids=token_ids(config.get("eos_token_id", family.eos_token_id), source),
            # transformers takes bfloat16 beside MXFP4.
            torch_dtype=_dtype(
                fields, "bfloat16" if quantization and quantization.method == "mxfp4" else "float32"
            ),
            mla=mla,
            moe=moe,
            quantization=quantization,
        )


def _linear_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return shapes | {f"{name}.bias": (rows,)} if bias else shapes


def token_ids(value: object, source: str) -> tuple[int, ...]:
    """The token ids of an `eos_token_id` field, which is null, an id or a list of ids.

    Raises:
        CheckpointError: it is anything else.
    """
    ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
    for item in ids:
        if not is_token_id(item):
            raise CheckpointError(
                f"{source}: eos_token_id is {shown(value)}; it must be a token id (an integer >= 0), a "
                "list of token ids, or null"
            )
    return tuple(ids)


def _architecture(fields: ConfigFields) -> str:
    """The first entry of `architectures`, else the architecture of `model_type`."""
    named, field = fields.config.get("architectures"), "architectures"
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
        wanted, field = str(fields.config.get("model_type")), "model_type"
        for architecture, family in FAMILIES.items():
            if family.model_type == wanted:
                return architecture
    raise UnsupportedModelError(
        f"{fields.source}: {field} names {wanted}, which is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _activation(fields: ConfigFields, family: Family) -> Any:
    name = fields.config.get(family.activation_field)
    name = family.activation if name is None else name
    if not isinstance(name, str) or name not in family.activations:
        raise UnsupportedModelError(
            f"{fields.source}: {family.activation_field} is {shown(name)}; supported are "
            f"{', '.join(family.activations)}"
        )
    return family.activations[name]


def _ropes(
    fields: ConfigFields, family: Family, head_dim: int, max_model_len: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Rotary embedding of the layers, and that of layers with a window where it is another."""

    def read(settings: Mapping[str, Any], theta: float) -> RopeConfig:
        try:
            return read_rope(
                fields,
                settings,
                head_dim=head_dim,
                max_model_len=max_model_len,
                default_theta=theta,
                default_partial=family.partial_rotary,
                default_original_len=family.original_max_len,
                scalings=family.rope_scalings,
                has_alpha=family.has_rope_alpha,
            )
        # Logarithms and powers of absurd numbers.
        except (ArithmeticError, ValueError) as error:
            raise CheckpointError(
                f"{fields.source}: the rotary settings {shown(dict(settings))} have no frequencies: {error}"
            ) from error

    if family.local_rope_theta is None:
        return read(rope_settings(fields) or family.rope, family.rope_theta), None
    settings = layer_type_settings(fields, family.local_rope_field, family.local_rope_theta)
    return (
        read(settings["full_attention"], family.rope_theta),
        read(settings["sliding_attention"], family.local_rope_theta),
    )


def _quantization(fields: ConfigFields, moe: MoeConfig | None) -> QuantizationConfig | None:
    """What the checkpoint says of its quantisation; MXFP4 is of stacked experts, and all else of others."""
    quantization = read_quantization(fields.config, fields.source)
    if quantization is None:
        return None
    has_stacks = moe is not None and moe.expert_format != "separate"
    if has_stacks != (quantization.method == "mxfp4"):
        raise UnsupportedModelError(
            f"{fields.source}: quantization_config, quant_method {quantization.method!r}: experts that are "
            "stacked in a tensor, as in gpt_oss models, are read in full precision and in mxfp4, and "
            "nothing else is read in mxfp4; use the original checkpoint"
        )
    return quantization


def _dtype(fields: ConfigFields, default: str) -> str:
    """The dtype of the checkpoint's weights; `default` if the configuration does not say."""
    given = (fields.config.get(name) for name in ("dtype", "torch_dtype"))
    value = next((value for value in given if value is not None), default)
    name = value.removeprefix("torch.") if isinstance(value, str) else None
    if name not in DTYPES:
        raise UnsupportedModelError(
            f"{fields.source}: dtype is {shown(value)}; supported are {', '.join(DTYPES)}"
        )
    return name
