"""A family with other arithmetic fits behind `Ops`: Gemma 2, written as a user would, against transformers.

Norms with an offset, before and after attention and MLP; soft caps of scores and logits; scaled
embeddings; every other layer with a window; another activation. Its `config.json` is not read: scale
and soft cap of attention are set by hand.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention.backend import backend_class
from ramify.attention.exactness import ProbeStore
from ramify.engine.execution.runner import ModelRunner
from ramify.kv.pool import KVPool
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.rope import RopeConfig
from ramify.models.decoders.decoder import Decoder, DecoderBinding
from ramify.models.kv_cache_spec import attention_spec, kv_layout
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.protocol import Attended, Embedding, ForwardStep, Heads, LmHead, Norm, Ops
from ramify.models.ops.registry import OPS
from tests.cpu.test_fused_attention import NUM_PAGES, PAGE, plan_of

transformers = pytest.importorskip("transformers", reason="the oracle of model families")


class GemmaLayer:
    """Norms around attention and around the MLP, all with 1 + weight."""

    def __init__(self, ops: Ops, config: ModelConfig, layer: int) -> None:
        prefix, attn = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        before, after, before_mlp, after_mlp = (
            Norm(f"{prefix}{name}_layernorm", config.rms_norm_eps, offset=1.0)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv = ops.linear(*(f"{attn}{name}_proj" for name in "qkv"), norm=before, shard=heads)
        self.attention = ops.attention(layer, heads, config.rope)
        self.o_proj = ops.linear(f"{attn}o_proj", shard="rows")
        self.attention_norm, self.mlp_norm = ops.norm(after), ops.norm(after_mlp)
        self.mlp = Mlp(ops, f"{prefix}mlp.", norm=before_mlp, activation="gelu_tanh_mul")

    def attend(self, hidden: Tensor, step: ForwardStep) -> Attended:
        return self.attention(self.qkv(hidden, step), step)

    def finish(self, hidden: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        hidden = hidden + self.attention_norm(self.o_proj(rows, step))
        return hidden + self.mlp_norm(self.mlp(hidden, step))


def gemma_embedding(ops: Ops, config: ModelConfig) -> Embedding:
    return ops.embedding("model.embed_tokens", scale=config.hidden_size**0.5)


def gemma_lm_head(ops: Ops, config: ModelConfig) -> LmHead:
    norm = Norm("model.norm", config.rms_norm_eps, offset=1.0)
    return ops.lm_head("model.embed_tokens", norm=norm, soft_cap=5.0)


GEMMA = DecoderBinding(GemmaLayer, gemma_embedding, gemma_lm_head)

CONFIG = ModelConfig(
    architecture="Gemma2ForCausalLM",
    vocab_size=210,
    hidden_size=60,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=18,
    intermediate_size=100,
    max_model_len=256,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10_000.0),
    sliding_window=16,
    full_attention_layers=frozenset({1, 3}),
    tie_word_embeddings=True,
)


def oracle() -> Any:
    """A random Gemma 2 of transformers; large scores and logits, so that the caps matter."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        intermediate_size=CONFIG.intermediate_size,
        max_position_embeddings=CONFIG.max_model_len,
        sliding_window=CONFIG.sliding_window,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
        attn_implementation="eager",
        initializer_range=0.2,
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, std=0.3)
    return model


def runner_of(model: Any, ops: str, dtype: torch.dtype) -> ModelRunner:
    weights = {name: weight.detach().to(dtype) for name, weight in model.named_parameters()}
    bound = OPS[ops](weights, dtype=dtype, max_len=CONFIG.max_model_len, store=ProbeStore(None))
    spec = attention_spec(CONFIG, page_size=PAGE, dtype=dtype, exact=True)
    spec = replace(spec, scale=0.5, soft_cap=3.0)
    backend = backend_class("cpu" if ops == "cpu" else "blocked")(spec, torch.device("cpu"))
    pool = KVPool(kv_layout(CONFIG), NUM_PAGES, PAGE, dtype=dtype)
    return ModelRunner(Decoder(CONFIG, bound, GEMMA), pool, backend)


def logits_of(runner: ModelRunner, ends: list[int]) -> Tensor:
    """Logits of the same tokens, computed in steps that end there."""
    token_ids = plan_of([(0, ends[-1])]).token_ids
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        plan = replace(plan_of([(start, end - start)]), token_ids=token_ids[start:end])
        rows.append(runner.logits(runner.forward(plan), range(end - start)))
    return torch.cat(rows)


@pytest.mark.parametrize("ops", ["cpu", "torch"])
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(ops: str) -> None:
    """float32 within 1e-4 of the largest logit, bfloat16 near; in chunks the same bits."""
    if ops == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    model = oracle()
    with torch.inference_mode():
        token_ids = torch.tensor(plan_of([(0, 90)]).token_ids)
        expected = model(token_ids[None]).logits[0]
    assert float(expected.abs().max()) > 4.0, "the soft cap of logits changes nothing"
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        runner = runner_of(model, ops, dtype)

        logits = logits_of(runner, [90])

        error = (logits - expected).abs().max() / expected.abs().max()
        assert float(error) < tolerance
        assert torch.equal(logits_of(runner, [1, 8, 41, 90]), logits)
        operations = " + ".join(verdict.operation for verdict in runner.model.exactness())
        assert {"rms_norm", "gelu_tanh_mul", "soft_cap"} <= {*operations.split(" + ")}
