"""DeepSeek checkpoints that transformers wrote: its logits, and the same bits whatever was cached.

Every checkpoint is random, tiny, and saved by transformers; what it computes in float32 with eager
attention is the oracle.
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
from ramify.models.deepseek_config import MoeConfig
from ramify.models.loader import load_model, load_weights, read_config
from ramify.models.moe import route
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from tests.cpu.deepseek_cases import BASE, CONFIGS, Oracle, prompts, save_oracle
from tests.cpu.engine_cases import Engine, Model, Sizes, assert_idle, differences

NUM_NEW = 4
CLOSE = 5e-5  # of log probabilities with a deviation of 1


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Oracles by name, each written and loaded once."""
    known: dict[str, Oracle] = {}

    def load(name: str) -> Oracle:
        if name not in known:
            known[name] = save_oracle(name, tmp_path_factory.mktemp(name))
        return known[name]

    return load


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, dtype="float32", kv_cache_tokens=4096, **options)


def assert_answers(oracle: Oracle, outputs: list[RequestOutput], asked: list[list[int]]) -> None:
    """The oracle's tokens, with its log probabilities."""
    for output, prompt in zip(outputs, asked, strict=True):
        answer, logprobs = oracle.greedy(prompt, NUM_NEW)
        assert list(output.token_ids) == answer
        found = [one.logprob for one in output.completions[0].logprobs or ()]
        assert found == pytest.approx(logprobs, abs=CLOSE)


# -- the numbers of transformers --------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_every_position_are_those_of_transformers(
    oracle_of: Callable[[str], Oracle], name: str, exact: bool
) -> None:
    """Cold, one prompt, every token of it scored."""
    oracle, prompt = oracle_of(name), prompts()[5]
    llm = engine(oracle.path, exact=exact, page_size=3)

    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))

    table = oracle.logits(prompt).log_softmax(-1)
    expected = [float(table[at, token]) for at, token in enumerate(prompt[1:])]
    found = [one.logprob for one in output.prompt_logprobs or () if one is not None]
    assert found == pytest.approx(expected, abs=CLOSE)
    assert len(set(expected)) > 20


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", CONFIGS)
def test_answers_are_those_of_transformers_whatever_is_cached(
    oracle_of: Callable[[str], Oracle], name: str, exact: bool
) -> None:
    """Cold, warm, in chunks of a few tokens, and all prompts in one batch."""
    oracle, asked = oracle_of(name), prompts()
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, logprobs=0)
    llm = engine(oracle.path, exact=exact, page_size=4)
    chunked = engine(oracle.path, exact=exact, page_size=3, max_batch_tokens=11)

    alone = [llm.generate([prompt], params)[0] for prompt in asked]
    warm = llm.generate(asked, params)
    pieces = chunked.generate(asked, params)

    for outputs in (alone, warm, pieces):
        assert_answers(oracle, outputs, asked)
    assert all(output.cache.read_tokens > 0 for output in warm)
    assert_idle(llm)
    assert_idle(chunked)


def test_the_sparse_index_matters_and_is_obeyed(tmp_path: Path) -> None:
    """With 20 of 70 keys read the logits are other ones than with all, and transformers' both."""
    prompt = prompts()[5]
    tables = []
    for top_k in (20, 512):
        oracle = save_oracle("v32", tmp_path / str(top_k), index_topk=top_k)
        llm = engine(oracle.path)
        [output] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))
        own = [one.logprob for one in output.prompt_logprobs or () if one is not None]
        table = oracle.logits(prompt).log_softmax(-1)
        assert own == pytest.approx(
            [float(table[at, token]) for at, token in enumerate(prompt[1:])], abs=CLOSE
        )
        tables.append(own)

    assert tables[0][:19] == pytest.approx(tables[1][:19], abs=CLOSE)
    assert max(abs(a - b) for a, b in zip(*tables, strict=True)) > 0.1


# -- the same bits ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(CpuBackend, "float32"), (CpuBackend, "bfloat16"), (EagerBackend, "float32")],
)
@pytest.mark.parametrize("name", ["v2", "v3", "v32"])
def test_bits_depend_on_nothing_but_the_prompt(
    oracle_of: Callable[[str], Oracle], name: str, backend: type[AttentionBackend], dtype: str
) -> None:
    """Cold, warm, chunked, batched, preempted: the logits and latents of each prompt alone.

    Free pages hold NaN. The K/V that decoding wrote equals what prefill writes.
    """
    decoder = load_model(oracle_of(name).path, dtype=dtype)
    model = Model(name, decoder, backend=backend)
    mixed = [tuple(prompt) for prompt in prompts()], [3, 1, 2, 5, 3, 2, 4]
    growing = [tuple(prompt[:5]) for prompt in prompts()[2:]], [14] * 5
    usual = Sizes(page_size=4, num_pages=400)
    preempted = 0

    for sizes, (asked, counts) in (
        (usual, mixed),
        (replace(usual, max_batch_tokens=9, page_size=3), mixed),
        (replace(usual, max_num_seqs=3, page_size=1, max_batch_tokens=37), mixed),
        (replace(usual, prefix_cache=False, max_batch_tokens=30), mixed),
        (replace(usual, num_pages=8), growing),
    ):
        llm = Engine(model, sizes)
        for _ in ("cold", "warm"):
            answers = llm.generate(asked, counts)
            for (output, logits), prompt in zip(answers, asked, strict=True):
                kept = llm.cached_kv(prompt + output.token_ids)
                assert not list(differences(model, prompt, output.token_ids, logits, kept))
        preempted += llm.core.scheduler.num_preemptions

    assert preempted > 0


def test_rows_would_differ_without_padding(oracle_of: Callable[[str], Oracle]) -> None:
    """The comparison sees what `exact` prevents: unpadded float32 linears give other bits."""
    decoder = load_model(oracle_of("v3").path, store=ProbeStore(None), linear_strategy="plain")
    model = Model("plain", decoder, backend=EagerBackend, row_multiple=1)
    asked = [tuple(prompt) for prompt in prompts()]

    llm = Engine(model, Sizes(page_size=4, max_batch_tokens=9))
    answers = llm.generate(asked, [2] * 7)

    assert any(
        list(differences(model, prompt, output.token_ids, logits, llm.cached_kv(prompt)))
        for (output, logits), prompt in zip(answers, asked, strict=True)
    )


def test_every_operation_is_accounted_for(oracle_of: Callable[[str], Oracle]) -> None:
    """What only these models compute has been probed: router, heads, index, norms."""
    names = {one.operation for one in engine(oracle_of("v32").path).engine.exactness()}

    assert names >= {"sigmoid router", "per-head matmul", "index scores", "layer_norm", "linear"}


# -- routing ----------------------------------------------------------------------------------


def routing(**changes: Any) -> MoeConfig:
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


def test_equal_experts_go_to_the_lowest() -> None:
    """All equal: experts 0, 1 and 2, which are the lowest of the two lowest groups."""
    weights = route(torch.zeros(1, 8), torch.zeros(8), routing())

    third = 2.5 / 3
    assert weights[0].tolist() == pytest.approx([third, third, third, 0, 0, 0, 0, 0])


def test_the_bias_chooses_but_does_not_weigh() -> None:
    """Expert 6 wins by its bias and counts with its own score; the weights sum to the scale."""
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 5, 0])

    weights = route(torch.zeros(1, 8), bias, routing())[0]

    assert weights.nonzero()[:, 0].tolist() == [0, 1, 6]
    assert float(weights[6]) == pytest.approx(2.5 / 3)


def test_groups_limit_the_choice() -> None:
    """The second best expert is out of reach if its group is not among the best."""
    logits = torch.tensor([[9.0, -9, 8, -9, 7, 7, 6, 6]])

    assert route(logits, torch.zeros(8), routing())[0].nonzero()[:, 0].tolist() == [4, 5, 6]
    open_choice = routing(num_groups=1, topk_groups=1)
    assert route(logits, torch.zeros(8), open_choice)[0].nonzero()[:, 0].tolist() == [0, 2, 4]
    best_one = routing(scoring="softmax", normalise=False, scale=1.0)
    assert route(logits, None, best_one)[0].nonzero()[:, 0].tolist() == [0, 1, 2]


# -- configuration and files ------------------------------------------------------------------


def edit_json(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_the_style_of_published_checkpoints_is_read(tmp_path: Path) -> None:
    """`rope_scaling` with `type`, `rope_theta` at the top, routing methods by name."""
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


def test_layers_that_draft_are_left_aside(tmp_path: Path) -> None:
    """V3 checkpoints hold a predictor behind the last layer; it is not loaded."""
    save_oracle("v3", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}
    save_file(weights, file, metadata={"format": "pt"})

    names = load_weights(tmp_path, read_config(tmp_path), dtype=torch.float32)

    assert "model.layers.3.eh_proj.weight" not in names
    assert len(names) == len(weights) - 1


def test_the_routing_bias_stays_float32(tmp_path: Path) -> None:
    """Among bfloat16 weights too, as in the checkpoints."""
    oracle = save_oracle("v32", tmp_path)
    config = read_config(tmp_path)

    weights = load_weights(tmp_path, config, dtype=torch.bfloat16)

    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    wanted: Tensor = oracle.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(weights[bias], wanted)
    kept = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert kept == {name for name in weights if config.is_float32(name)}


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
        ("v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_what_is_not_built_is_refused(
    oracle_of: Callable[[str], Oracle],
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    """A setting that would change the numbers silently raises instead."""
    (tmp_path / "config.json").write_text((oracle_of(name).path / "config.json").read_text())
    edit_json(tmp_path, **changes)

    with pytest.raises(UnsupportedModelError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ({"num_experts_per_tok": 5}, "5 experts per token cannot come from 2 of 4 groups"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ({"index_head_dim": 4}, "index_head_dim 4 is below"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 leaves 1 of 8 experts"),
    ],
)
def test_contradictions_are_refused(
    oracle_of: Callable[[str], Oracle], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """The message names the field and what it collides with."""
    (tmp_path / "config.json").write_text((oracle_of("v32").path / "config.json").read_text())
    without = {} if "first_k_dense_replace" not in changes else {"mlp_layer_types": None}
    edit_json(tmp_path, **changes, **without)

    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_null_is_false(oracle_of: Callable[[str], Oracle], tmp_path: Path) -> None:
    """As in transformers; what is not there is true."""
    (tmp_path / "config.json").write_text((oracle_of("v3").path / "config.json").read_text())
    edit_json(tmp_path, norm_topk_prob=None, rope_interleave=None)

    config = read_config(tmp_path)

    assert config.moe is not None
    assert config.mla is not None
    assert (config.moe.normalise, config.mla.rope_interleaved) == (False, False)


def test_every_config_has_what_another_lacks() -> None:
    """Nothing in the list is there twice, and value and key widths differ."""
    assert len({repr(config) for config in CONFIGS.values()}) == len(CONFIGS)
    assert BASE["v_head_dim"] != BASE["qk_nope_head_dim"]
