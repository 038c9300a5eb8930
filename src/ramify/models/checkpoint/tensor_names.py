"""Names of a checkpoint's tensors in its files -> those of `ModelConfig.tensor_shapes`, and their layers."""

from __future__ import annotations

from ramify.models.configs.families import FAMILIES
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.wrappers import is_other_part, text_tensor_name

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEAD_LAYER = "lm_head"
# What matrices of linear layers end with, in all families; not router gates.
LINEARS = (
    "_proj.weight", ".kv_a_proj_with_mqa.weight", ".c_fc.weight", ".input_linear.weight", ".output_linear.weight",
    ".w1.weight", ".w2.weight", ".w3.weight",
)  # fmt: skip
# Scales of activations and of K/V, both of which are kept in full precision here.
SCALES_OF_OTHERS = (
    ".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale",
)  # fmt: skip


class TensorNames:
    """What the tensors in a checkpoint's files are to the text model.

    Attributes:
        shapes: `ModelConfig.stored_shapes`.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.shapes = config.stored_shapes()
        self._config = config
        weights = [name for name, shape in self.shapes.items() if len(shape) == 2]
        layers = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
        self._layers = (layers | {HEAD_LAYER}) - {EMBEDDING.removesuffix(".weight")}

    def full_name(self, stored_name: str) -> str:
        """The name of a tensor in a text model: base models, as for embeddings, leave out `model.`."""
        is_wrapped = self._config.wrapper is not None
        name = text_tensor_name(stored_name) if is_wrapped else stored_name
        full = f"model.{name}"
        return full if not self._is_known(name) and self._is_known(full) else name

    def layer_of(self, name: str) -> tuple[str, str] | None:
        """The linear layer that a tensor is part of, and the rest of its name; None if there is none."""
        end = name.rfind(".")
        while end > 0:
            if name[:end] in self._layers:
                return name[:end], name[end + 1 :]
            end = name.rfind(".", 0, end)
        return None

    def is_ignorable(self, name: str) -> bool:
        """Whether to skip a tensor: a buffer that older tools saved, a draft layer, an encoder of images."""
        config = self._config
        if config.wrapper is not None and is_other_part(name):
            return True
        layer = name.removeprefix("model.layers.").split(".")[0]
        has_mtp = FAMILIES[config.architecture].has_mtp_layers
        if has_mtp and layer.isdecimal() and int(layer) >= config.num_layers:
            # Multi-token-prediction layers are numbered after the last decoder layer.
            return True
        if config.quantization is not None and name.endswith(SCALES_OF_OTHERS):
            return True
        return name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))

    def _is_known(self, name: str) -> bool:
        return name in self.shapes or self.layer_of(name) is not None
