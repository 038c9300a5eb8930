"""Text decoders inside models that also read images or audio: their settings and tensor names. No torch.

A wrapper's `config.json` has the text decoder's settings in `text_config`, and its files hold the text
decoder's tensors under a prefix, beside encoders and projectors. Only the text decoder is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.fields import ConfigFields, shown
from ramify.models.configs.model_config import token_ids

# Rotary positions with several axes (time, height, width); in text all are 0, 1, 2, ...
MULTI_AXIS_ROPE = "mrope"
# Text decoders that are a family under another name, but for rotary positions with several axes.
SAME_AS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}


def _sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, length: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
    }


# transformers writes into `text_config` only what differs from the defaults of the text decoder.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _sizes(32_000, 4096, 11_008, 32, 32, 32, 2048),
    "mistral": _sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072),
    "qwen2": _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
    "qwen3": _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768),
    "gemma3_text": _sizes(262_208, 2304, 9216, 26, 8, 4, 131_072),
    "cohere2": _sizes(256_000, 8192, 22_528, 40, 64, 64, 8192),
    "qwen3_vl_text": _sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000) | {"rope_theta": 500_000.0},
}
for _kind in ("qwen2_vl_text", "qwen2_5_vl_text"):
    TEXT_DEFAULTS[_kind] = _sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768) | {
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 151_645,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A row of `WRAPPERS`."""

    model_type: str
    text_type: str  # where `text_config` does not say
    text_defaults: Mapping[str, Any] = field(default_factory=dict)  # beside `TEXT_DEFAULTS`


WRAPPERS: dict[str, Wrapper] = {
    "Gemma3ForConditionalGeneration": Wrapper(model_type="gemma3", text_type="gemma3_text"),
    "Mistral3ForConditionalGeneration": Wrapper(model_type="mistral3", text_type="mistral"),
    "LlavaForConditionalGeneration": Wrapper(model_type="llava", text_type="llama"),
    "LlavaNextForConditionalGeneration": Wrapper(model_type="llava_next", text_type="llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper(
        model_type="llava_onevision", text_type="qwen2"
    ),
    "InternVLForConditionalGeneration": Wrapper(model_type="internvl", text_type="qwen2"),
    "Idefics3ForConditionalGeneration": Wrapper(model_type="idefics3", text_type="llama"),
    "SmolVLMForConditionalGeneration": Wrapper(model_type="smolvlm", text_type="llama"),
    "AyaVisionForConditionalGeneration": Wrapper(model_type="aya_vision", text_type="cohere2"),
    "Cohere2VisionForConditionalGeneration": Wrapper(
        model_type="cohere2_vision", text_type="cohere2"
    ),
    "Qwen2VLForConditionalGeneration": Wrapper(model_type="qwen2_vl", text_type="qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper(
        model_type="qwen2_5_vl", text_type="qwen2_5_vl_text"
    ),
    "Qwen3VLForConditionalGeneration": Wrapper(model_type="qwen3_vl", text_type="qwen3_vl_text"),
    "Qwen2AudioForConditionalGeneration": Wrapper(model_type="qwen2_audio", text_type="qwen2"),
    "VoxtralForConditionalGeneration": Wrapper(
        model_type="voxtral",
        text_type="llama",
        text_defaults=_sizes(131_072, 3072, 8192, 30, 32, 8, 131_072)
        | {"rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0, "head_dim": 128},
    ),
}
# Prefixes of the text decoder's tensors -> those of a text checkpoint.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# Tensors of encoders and projectors, with or without `model.` before them.
OTHER_PARTS = (
    "audio_tower.",
    "connector.",
    "image_newline",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)
# Settings of the whole model that count for its text decoder too.
SHARED_FIELDS = ("dtype", "torch_dtype", "quantization_config", "compression_config")
EOS = "eos_token_id"  # of the whole and of its text decoder: both count


def find_wrapper(fields: Mapping[str, Any]) -> str | None:
    """The architecture of a `config.json` if it is one of `WRAPPERS`; None if not."""
    named = fields.get("architectures")
    if isinstance(named, list) and named:
        return named[0] if isinstance(named[0], str) and named[0] in WRAPPERS else None
    kind = fields.get("model_type")
    return next((name for name, row in WRAPPERS.items() if row.model_type == kind), None)


def text_fields(
    fields: Mapping[str, Any], source: str, architecture: str, *, has_head: bool
) -> dict[str, Any]:
    """The `config.json` that the text decoder of a wrapper would have on its own.

    Args:
        source: file name for error messages.
        architecture: of the wrapper.
        has_head: the checkpoint has an LM head of its own. Configurations are no guide: some say in
            two places that embeddings are tied, and contradict themselves.

    Raises:
        UnsupportedModelError: the text decoder is none of our families.
        CheckpointError: `text_config` is not an object.
    """
    wrapper = WRAPPERS[architecture]
    inner = fields.get("text_config")
    if inner is None:
        # Early Qwen2-VL files have all settings side by side.
        inner = {name: value for name, value in fields.items() if name != "architectures"}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{source}: text_config is {shown(inner)}; it must be an object")
    kind = inner.get("model_type")
    kind = wrapper.text_type if kind is None or kind == wrapper.model_type else kind
    family = SAME_AS.get(kind, kind) if isinstance(kind, str) else None
    names = [name for name, row in FAMILIES.items() if row.model_type == family]
    if not names:
        known = sorted({row.model_type for row in FAMILIES.values()} | SAME_AS.keys())
        raise UnsupportedModelError(
            f"{source}: {architecture} has a text decoder of kind {shown(kind)} (model_type in "
            f"text_config); only {', '.join(known)} run"
        )
    text = {**TEXT_DEFAULTS.get(kind, {}), **wrapper.text_defaults, **inner}
    text |= {name: fields[name] for name in SHARED_FIELDS if fields.get(name) is not None}
    ends = (*token_ids(inner.get(EOS), source), *token_ids(fields.get(EOS), source))
    text |= {EOS: list(dict.fromkeys(ends))} if ends else {}
    text |= {"architectures": names, "model_type": family}
    for name in ("rope_scaling", "rope_parameters"):
        text[name] = _single_axis(text.get(name))
    name = "tie_word_embeddings"
    said = [
        ConfigFields(part, source).flag(name, False) for part in (fields, inner) if name in part
    ]
    # Without a head one "true" is enough: LLaVA-OneVision 0.5B says "false" and, in `text_config`, "true".
    text[name] = not has_head and (any(said) or not said)
    return text


def _single_axis(settings: Any) -> Any:
    """Rotary settings without the axes of images: text counts alike along all of them."""
    if not isinstance(settings, Mapping):
        return settings
    return {
        name: "default" if name in ("type", "rope_type") and value == MULTI_AXIS_ROPE else value
        for name, value in settings.items()
    }


def is_other_part(name: str) -> bool:
    """Whether a wrapper's tensor belongs to an encoder or a projector, not to the text decoder."""
    return name.removeprefix("model.").startswith(OTHER_PARTS)


def text_tensor_name(name: str) -> str:
    """The name that a tensor of a wrapper's text decoder has in a text checkpoint."""
    for prefix, text_prefix in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return text_prefix + name.removeprefix(prefix)
    return name
