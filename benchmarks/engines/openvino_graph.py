"""A Llama checkpoint as an OpenVINO graph: what its exporter would make, without the exporter.

The graph is stateful: keys and values of each layer are a variable that grows along the sequence.
OpenVINO GenAI recognises that form and puts paged attention in its place.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from engines.contract import Setup
from engines.openvino_weights import encode, node
from engines.weights import as_float32, read_weights

FILE = "openvino_model.xml"


def write_graph(setup: Setup, bits: int = 0) -> Path:
    """Write a checkpoint's graph unless it exists; returns its folder.

    Args:
        bits: 8 or 4: of the weights of linear layers; embedding and head then have 8. 0: full precision.
    """
    suffix = f"-int{bits}" if bits else ""
    folder = setup.folder / f"openvino-{setup.dtype}{suffix}"
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        openvino: Any = importlib.import_module("openvino")
        config = json.loads((setup.checkpoint / "config.json").read_text("utf-8"))
        weights = read_weights(setup.checkpoint / "model.safetensors")
        graph = _Graph(config, weights, bits)
        model = graph.build()
        openvino.save_model(model, folder / FILE, compress_to_fp16=False)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        (folder / "complete").write_text(str(graph.token_bytes), "ascii")
    return folder


class _Graph:
    """Builds the graph layer by layer; `o` is OpenVINO's operation set."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Any], bits: int) -> None:
        self.o: Any = importlib.import_module("openvino.opset13")
        self.assign: Any = importlib.import_module("openvino.opset6").assign
        self.read_value: Any = importlib.import_module("openvino.opset6").read_value
        self.types: Any = importlib.import_module("openvino").Type
        self.openvino: Any = importlib.import_module("openvino")
        self.config, self.weights, self.bits = config, weights, bits
        self.token_bytes = 0  # of the weights that a decode step reads
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.sinks: list[Any] = []

    def build(self) -> Any:
        """Build the whole model, from ids to logits."""
        o = self.o
        ids = self._input("input_ids", self.types.i64, [-1, -1])
        mask = self._input("attention_mask", self.types.i64, [-1, -1])
        positions = self._input("position_ids", self.types.i64, [-1, -1])
        beams = self._input("beam_idx", self.types.i32, [-1])
        self.beams = beams
        embedding = "model.embed_tokens.weight"
        table, _ = self._weight(embedding, 8)
        x = o.gather(table, o.convert(ids, "i32"), self._int(0))
        self.batch = o.gather(o.shape_of(ids, "i64"), self._ints([0]), self._int(0))
        cos, sin = self._rotation(positions)
        bias = self._bias(mask, ids)
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm.weight")
            x = o.add(x, self._attention(normed, prefix + "self_attn.", layer, cos, sin, bias))
            normed = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = o.swish(self._linear(normed, prefix + "mlp.gate_proj.weight"))
            up = self._linear(normed, prefix + "mlp.up_proj.weight")
            x = o.add(x, self._linear(o.multiply(gate, up), prefix + "mlp.down_proj.weight"))
        head = "lm_head.weight" if "lm_head.weight" in self.weights else embedding
        logits = self._linear(self._norm(x, "model.norm.weight"), head, 8)
        logits.output(0).set_names({"logits"})
        result = o.result(logits)
        inputs = [ids, mask, positions, beams]
        return self.openvino.Model([result], self.sinks, inputs, "llama")

    def _input(self, name: str, kind: Any, shape: list[int]) -> Any:
        node = self.o.parameter(shape, kind, name=name)
        node.output(0).set_names({name})
        return node

    def _int(self, value: int) -> Any:
        return self.o.constant(np.array(value, np.int64))

    def _ints(self, values: list[int]) -> Any:
        return self.o.constant(np.array(values, np.int64))

    def _number(self, value: float) -> Any:
        return self.o.constant(np.array(value, np.float32))

    def _linear(self, x: Any, name: str, bits: int | None = None) -> Any:
        weight, num_bytes = self._weight(name, self.bits if bits is None else bits)
        self.token_bytes += num_bytes
        return self.o.matmul(x, weight, False, True)

    def _weight(self, name: str, bits: int) -> tuple[Any, int]:
        """A matrix and its bytes; in full precision if the whole graph is."""
        values = as_float32(self.weights[name])
        if not self.bits:
            return self.o.constant(values), values.nbytes
        encoded = encode(values, bits)
        return node(encoded), encoded.num_bytes

    def _norm(self, x: Any, name: str) -> Any:
        o = self.o
        square = o.reduce_mean(o.power(x, self._number(2.0)), self._ints([-1]), True)
        root = o.sqrt(o.add(square, self._number(self.config["rms_norm_eps"])))
        scaled = o.multiply(x, o.divide(self._number(1.0), root))
        return o.multiply(o.constant(as_float32(self.weights[name])), scaled)

    def _rotation(self, positions: Any) -> tuple[Any, Any]:
        """Return cosines and sines [batch, 1, tokens, head_dim] of the rotary embedding."""
        o = self.o
        theta = self.config["rope_theta"]
        powers = np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim
        inverse = (1.0 / theta**powers).astype(np.float32).reshape(1, -1, 1)
        columns = o.convert(o.unsqueeze(positions, self._int(1)), "f32")
        angles = o.transpose(o.matmul(o.constant(inverse), columns, False, False), [0, 2, 1])
        both = o.unsqueeze(o.concat([angles, angles], -1), self._int(1))
        return o.cos(both), o.sin(both)

    def _rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        o, half = self.o, self.head_dim // 2
        last, step = self._ints([-1]), self._ints([1])
        low = o.slice(x, self._ints([0]), self._ints([half]), step, last)
        high = o.slice(x, self._ints([half]), self._ints([2 * half]), step, last)
        turned = o.concat([o.multiply(high, self._number(-1.0)), low], -1)
        return o.add(o.multiply(x, cos), o.multiply(turned, sin))

    def _bias(self, mask: Any, ids: Any) -> Any:
        """Return the additive causal mask [batch, 1, tokens, keys]."""
        o = self.o
        keys = o.gather(o.shape_of(mask, "i64"), self._ints([1]), self._int(0))
        rows = o.gather(o.shape_of(ids, "i64"), self._ints([1]), self._int(0))
        end, count = o.squeeze(keys, self._int(0)), o.squeeze(rows, self._int(0))
        of_keys = o.range(self._int(0), end, self._int(1), "i64")
        of_rows = o.range(o.subtract(end, count), end, self._int(1), "i64")
        seen = o.less_equal(o.unsqueeze(of_keys, self._int(0)), o.unsqueeze(of_rows, self._int(1)))
        given = o.unsqueeze(o.convert(mask, "boolean"), self._ints([1, 2]))
        allowed = o.logical_and(o.unsqueeze(seen, self._ints([0, 1])), given)
        return o.select(allowed, self._number(0.0), self._number(-1e30))

    def _split(self, x: Any, heads: int) -> Any:
        shaped = self.o.reshape(x, self._ints([0, 0, heads, self.head_dim]), True)
        return self.o.transpose(shaped, self._ints([0, 2, 1, 3]))

    def _kept(self, name: str, new: Any) -> Any:
        """Append new keys or values to their state variable; returns it repeated per query head."""
        o = self.o
        empty = o.broadcast(
            self._number(0.0),
            o.concat([self.batch, self._ints([self.kv_heads, 0, self.head_dim])], 0),
        )
        shape = self.openvino.PartialShape([-1, self.kv_heads, -1, self.head_dim])
        past = self.read_value(empty, name, self.types.f32, shape)
        whole = o.concat([o.gather(past, self.beams, self._int(0)), new], 2)
        self.sinks.append(self.assign(whole, name))
        groups = self.heads // self.kv_heads
        if groups == 1:
            return whole
        lengths = o.gather(o.shape_of(whole, "i64"), self._ints([0, 1]), self._int(0))
        rest = o.gather(o.shape_of(whole, "i64"), self._ints([2, 3]), self._int(0))
        wide = o.broadcast(
            o.unsqueeze(whole, self._int(2)),
            o.concat([lengths, self._ints([groups]), rest], 0),
            "BIDIRECTIONAL",
        )
        return o.reshape(wide, self._ints([0, self.heads, -1, self.head_dim]), True)

    def _attention(self, x: Any, prefix: str, layer: int, cos: Any, sin: Any, bias: Any) -> Any:
        o = self.o
        q = self._rotated(
            self._split(self._linear(x, prefix + "q_proj.weight"), self.heads), cos, sin
        )
        k = self._split(self._linear(x, prefix + "k_proj.weight"), self.kv_heads)
        v = self._split(self._linear(x, prefix + "v_proj.weight"), self.kv_heads)
        keys = self._kept(
            f"past_key_values.{layer}.keypresent.{layer}.key", self._rotated(k, cos, sin)
        )
        values = self._kept(f"past_key_values.{layer}.valuepresent.{layer}.value", v)
        output = o.scaled_dot_product_attention(q, keys, values, bias)
        joined = o.reshape(
            o.transpose(output, self._ints([0, 2, 1, 3])),
            self._ints([0, 0, self.heads * self.head_dim]),
            True,
        )
        return self._linear(joined, prefix + "o_proj.weight")
