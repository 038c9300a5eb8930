"""DeepSeek models: logits and answers of transformers, and the same bits whatever was cached.

Checkpoints are tiny, random and saved by transformers. The oracle is transformers in float32 with
eager attention.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.exactness import ProbeStore
from ramify.engine.llm import LLM
from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.checkpoint.tensors import load_weights
from ramify.models.configs.moe import MoeConfig
from ramify.models.loader import load_model, read_config
from ramify.models.ops.quantized import as_tensor
from ramify.models.ops.routing import route
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from tests.cpu.deepseek_cases import BASE, CONFIGS, Oracle, prompts, save_oracle
from tests.cpu.engine_cases import Engine, Model, Sizes, assert_idle, differences
from tests.cpu.tiny_models import ops_of

NUM_NEW = 4
CLOSE = 5e-5  # tolerance of log probabilities, whose standard deviation is about 1


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Oracles by name, each written and loaded once."""
    oracles: dict[str, Oracle] = {}

    def load(name: str) -> Oracle:
        if name not in oracles:
            oracles[name] = save_oracle(name, tmp_path_factory.mktemp(name))
        return oracles[name]

    return load


MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "fast": {"exact": False},
    "exact, torch": {"ops": "torch"},
    "fast, torch": {"ops": "torch", "exact": False},
}


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, dtype="float32", kv_cache_tokens=4096, **options)


def assert_answers(oracle: Oracle, outputs: list[RequestOutput], prompts: list[list[int]]) -> None:
    """The oracle's greedy tokens, with its log probabilities."""
    for output, prompt in zip(outputs, prompts, strict=True):
        answer, expected = oracle.greedy(prompt, NUM_NEW)
        assert list(output.token_ids) == answer
        logprobs = [entry.logprob for entry in output.completions[0].logprobs or ()]
        assert logprobs == pytest.approx(expected, abs=CLOSE)


# -- logits and answers of transformers ------------------------------------------------------------


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_position_are_those_of_transformers(
    oracle_of: Callable[[str], Oracle], name: str, options: dict[str, Any]
) -> None:
    """A cold cache, one prompt, log probabilities of every prompt token."""
    oracle, prompt = oracle_of(name), prompts()[5]
    llm = engine(oracle.path, **options, page_size=3)

    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))

    table = oracle.logits(prompt).log_softmax(-1)
    expected = [float(table[position, token]) for position, token in enumerate(prompt[1:])]
    logprobs = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    assert logprobs == pytest.approx(expected, abs=CLOSE)
    assert len(set(expected)) > 20


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_transformers_whatever_is_cached(
    oracle_of: Callable[[str], Oracle], name: str, options: dict[str, Any]
) -> None:
    """Cold, warm, in chunks of a few tokens, and all prompts in one batch."""
    oracle, batch = oracle_of(name), prompts()
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
    llm = engine(oracle.path, **options, page_size=4)
    chunked = engine(oracle.path, **options, page_size=3, max_batch_tokens=11)

    alone = [llm.generate([prompt], params)[0] for prompt in batch]
    warm = llm.generate(batch, params)
    in_chunks = chunked.generate(batch, params)

    for outputs in (alone, warm, in_chunks):
        assert_answers(oracle, outputs, batch)
    assert all(output.cache.read_tokens > 0 for output in warm)
    assert_idle(llm)
    assert_idle(chunked)


def test_the_sparse_index_selects_keys(tmp_path: Path) -> None:
    """With 20 of 70 keys selected the logits differ from those with all keys; both are transformers'."""
    prompt = prompts()[5]
    tables = []
    for top_k in (20, 512):
        oracle = save_oracle("v32", tmp_path / str(top_k), index_topk=top_k)
        llm = engine(oracle.path)
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))
        logprobs = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        table = oracle.logits(prompt).log_softmax(-1)
        assert logprobs == pytest.approx(
            [float(table[position, token]) for position, token in enumerate(prompt[1:])], abs=CLOSE
        )
        tables.append(logprobs)

    assert tables[0][:19] == pytest.approx(tables[1][:19], abs=CLOSE)
    assert max(abs(a - b) for a, b in zip(*tables, strict=True)) > 0.1


# -- the same bits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "dtype", "ops"),
    [
        (CpuBackend, "float32", "auto"),
        (CpuBackend, "bfloat16", "auto"),
        (EagerBackend, "float32", "auto"),
        (EagerBackend, "float32", "torch"),
    ],
)
@pytest.mark.parametrize("name", ["v2", "v3", "v32"])
def test_bits_depend_on_nothing_but_the_prompt(
    oracle_of: Callable[[str], Oracle],
    name: str,
    backend: type[AttentionBackend],
    dtype: str,
    ops: str,
) -> None:
    """Cold, warm, chunked, batched, preempted: logits and cached K/V of the prompt computed alone.

    Free pages hold NaN. K/V written by decoding equals K/V written by prefill.
    """
    decoder = load_model(oracle_of(name).path, dtype=dtype, ops=ops)
    model = Model(name, decoder, backend=backend)
    all_prompts = [tuple(prompt) for prompt in prompts()], [3, 1, 2, 5, 3, 2, 4]
    short_prompts = [tuple(prompt[:5]) for prompt in prompts()[2:]], [14] * 5
    base = Sizes(page_size=4, num_pages=400)
    preempted = 0

    for sizes, (batch, counts) in (
        (base, all_prompts),
        (replace(base, max_batch_tokens=9, page_size=3), all_prompts),
        (replace(base, max_num_seqs=3, page_size=1, max_batch_tokens=37), all_prompts),
        (replace(base, prefix_cache=False, max_batch_tokens=30), all_prompts),
        (replace(base, num_pages=8), short_prompts),
    ):
        llm = Engine(model, sizes)
        for _ in ("cold", "warm"):
            answers = llm.generate(batch, counts)
            for (output, logits), prompt in zip(answers, batch, strict=True):
                cached = llm.cached_kv(prompt + output.token_ids)
                assert not list(differences(model, prompt, output.token_ids, logits, cached))
        preempted += llm.core.scheduler.num_preemptions

    assert preempted > 0


def test_rows_would_differ_without_padding(oracle_of: Callable[[str], Oracle]) -> None:
    """Fault injection: with plain float32 linears the comparison above finds differences."""
    decoder = load_model(oracle_of("v3").path, store=ProbeStore(None), ops=ops_of("plain"))
    model = Model("plain", decoder, backend=EagerBackend, row_multiple=1)
    batch = [tuple(prompt) for prompt in prompts()]

    llm = Engine(model, Sizes(page_size=4, max_batch_tokens=9))
    answers = llm.generate(batch, [2] * 7)

    assert any(
        list(differences(model, prompt, output.token_ids, logits, llm.cached_kv(prompt)))
        for (output, logits), prompt in zip(answers, batch, strict=True)
    )


def test_exactness_lists_the_operations_of_this_family(
    oracle_of: Callable[[str], Oracle],
) -> None:
    """Router, per-head matmul, index scores and layer norm have been probed."""
    names = {verdict.operation for verdict in engine(oracle_of("v32").path).engine.exactness()}

    assert names >= {"sigmoid router", "per-head matmul", "index scores", "layer_norm", "linear"}


# -- routing ----------------------------------------------------------------------------------


def routing(**changes: Any) -> MoeConfig:
    """A V3 router of 8 experts in 4 groups, 3 experts per token from 2 groups, with changes."""
    base: dict[str, Any] = {
        "num_experts": 8,
        "top_k": 3,
        "expert_intermediate_size": 1,
        "shared_intermediate_size": 1,
        "scoring": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "normalise": True,
        "scale": 2.5,
        "dense_layers": frozenset(),
    }
    return MoeConfig(**(base | changes))


def test_ties_go_to_the_lowest_experts() -> None:
    """All scores equal: experts 0, 1 and 2, the lowest of the two lowest groups."""
    weights = route(torch.zeros(1, 8), torch.zeros(8), routing())

    third = 2.5 / 3
    assert weights[0].tolist() == pytest.approx([third, third, third, 0, 0, 0, 0, 0])


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """Expert 6 is chosen by its bias, weighted by its score; the weights sum to `scale`."""
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 5, 0])

    weights = route(torch.zeros(1, 8), bias, routing())[0]

    assert weights.nonzero()[:, 0].tolist() == [0, 1, 6]
    assert float(weights[6]) == pytest.approx(2.5 / 3)


def test_groups_limit_the_choice() -> None:
    """An expert with a high score is not chosen if its group is not among the best groups."""
    logits = torch.tensor([[9.0, -9, 8, -9, 7, 7, 6, 6]])

    assert route(logits, torch.zeros(8), routing())[0].nonzero()[:, 0].tolist() == [4, 5, 6]
    open_choice = routing(num_groups=1, topk_groups=1)
    assert route(logits, torch.zeros(8), open_choice)[0].nonzero()[:, 0].tolist() == [0, 2, 4]
    v2_router = routing(scoring="softmax", normalise=False, scale=1.0)
    assert route(logits, None, v2_router)[0].nonzero()[:, 0].tolist() == [0, 1, 2]


# -- configuration and files ------------------------------------------------------------------


def edit_json(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_config_fields_of_published_checkpoints_are_read(tmp_path: Path) -> None:
    """`rope_scaling` with `type`, `rope_theta` at the top level, routing methods by name."""
    oracle = save_oracle("v3", tmp_path)
    modern = read_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_config(tmp_path) == modern
    assert modern.mla is not None
    assert modern.mla.scale == pytest.approx(float(oracle.model.model.layers[0].self_attn.scaling))


def test_multi_token_prediction_layers_are_not_loaded(tmp_path: Path) -> None:
    """V3 checkpoints number them after the last decoder layer."""
    save_oracle("v3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}
    save_file(weights, file, metadata={"format": "pt"})

    names = load_weights(tmp_path, read_config(tmp_path), dtype=torch.float32)

    assert "model.layers.3.eh_proj.weight" not in names
    assert len(names) == len(weights) - 1


def test_the_routing_bias_stays_float32(tmp_path: Path) -> None:
    """In a bfloat16 model too, as in the published checkpoints."""
    oracle = save_oracle("v32", tmp_path)
    config = read_config(tmp_path)

    weights = load_weights(tmp_path, config, dtype=torch.bfloat16)

    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected: Tensor = oracle.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(as_tensor(weights[bias]), expected)
    float32_names = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert float32_names == {name for name in weights if config.is_float32(name)}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("v3", {"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ("v32", {"q_lora_rank": None}, "q_lora_rank is null"),
        ("v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 3"),
        ("v3", {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'.*stacked"),
    ],
)
def test_unsupported_settings_are_refused(
    oracle_of: Callable[[str], Oracle],
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    """A setting that would change the results raises; the message names it."""
    (tmp_path / "config.json").write_text((oracle_of(name).path / "config.json").read_text())
    edit_json(tmp_path, **changes)

    with pytest.raises(UnsupportedModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"num_experts_per_tok": 5}, "topk_group 2 of n_group 4"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"index_head_dim": 4}, "index_head_dim 4 is below"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 leaves 1 of 8 experts"),
    ],
)
def test_contradictions_are_refused(
    oracle_of: Callable[[str], Oracle], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The message names the field and what it contradicts."""
    (tmp_path / "config.json").write_text((oracle_of("v32").path / "config.json").read_text())
    without = {} if "first_k_dense_replace" not in changes else {"mlp_layer_types": None}
    edit_json(tmp_path, **changes, **without)

    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_null_is_false(oracle_of: Callable[[str], Oracle], tmp_path: Path) -> None:
    """As in transformers: null means false, an absent field true."""
    (tmp_path / "config.json").write_text((oracle_of("v3").path / "config.json").read_text())
    edit_json(tmp_path, norm_topk_prob=None, rope_interleave=None)

    config = read_config(tmp_path)

    assert config.moe is not None
    assert config.mla is not None
    assert (config.moe.normalise, config.mla.rope_interleaved) == (False, False)


def test_configs_differ() -> None:
    """No two configs of the list are equal, and value and key widths differ."""
    assert len({repr(config) for config in CONFIGS.values()}) == len(CONFIGS)
    assert BASE["v_head_dim"] != BASE["qk_nope_head_dim"]
