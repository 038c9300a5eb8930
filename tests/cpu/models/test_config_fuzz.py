"""Every field of every native family's `config.json`, with values that it must not have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.errors import ModelError
from ramify.models.checkpoint.tensors import load_weights
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.model_config import ModelConfig
from ramify.models.loader import read_config
from tests.cpu import deepseek_cases
from tests.cpu.models.family_cases import CASES, SIZES, write_checkpoint

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

SOURCE = "some/config.json"
BAD_VALUES: tuple[Any, ...] = (
    "3", "x", "true", None, -1, 0, 1.5, 10**9, 10**400, float("nan"), float("inf"), [1], [], {},
    True, False,
)  # fmt: skip
# Beyond this a message is a dump, not a line.
MAX_MESSAGE_CHARS = 1500
# Sizes that are not those of a tensor, and some that are.
ABSURD = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_experts",
    "num_local_experts",
    "max_position_embeddings",
    "hidden_size",
    "vocab_size",
)
SAMPLED = ("Gemma3", "Qwen3Moe", "StableLm")
ABSURD_CASES = [
    case if case in SAMPLED else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


def config_fields(case: str) -> dict[str, Any]:
    """The whole `config.json` of a case of `family_cases` or `deepseek_cases`, defaults included."""
    if case in CASES:
        family = case.split(maxsplit=1)[0]
        kind, settings = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config", (
            SIZES | CASES[case]
        )  # fmt: skip
    else:
        kind, settings = deepseek_cases.CONFIGS[case]
        family, settings = kind.removesuffix("Config"), deepseek_cases.BASE | settings
    config = getattr(transformers, kind)(**settings)
    config.architectures = [f"{family}ForCausalLM"]
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


def places(fields: Mapping[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    """Paths of all fields, those inside objects too."""
    for name, value in fields.items():
        yield (*above, name)
        if isinstance(value, Mapping):
            yield from places(value, *above, name)


def changed(fields: Mapping[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The fields with another value at a path."""
    name, *rest = place
    return {**fields, name: changed(fields[name], tuple(rest), value) if rest else value}


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__


def test_the_cases_are_of_every_family() -> None:
    """No native family is left out of the tests of this file."""
    names = [config_fields(case)["architectures"][0] for case in (*CASES, *deepseek_cases.CONFIGS)]

    assert set(names) == set(FAMILIES)


@pytest.mark.parametrize("case", [*CASES, *deepseek_cases.CONFIGS])
def test_a_bad_value_is_one_error_or_changes_nothing(case: str) -> None:
    """A value of another JSON type never makes another model: it is refused, or nobody reads it.

    The error is a ModelError of one short line that names the file and a field of the configuration.
    """
    fields = config_fields(case)
    expected = ModelConfig.from_hf(fields, SOURCE)
    for place in places(fields):
        old = fields
        for name in place:
            old = old[name]
        for value in BAD_VALUES:
            try:
                config = ModelConfig.from_hf(changed(fields, place, value), SOURCE)
            except ModelError as error:
                message = str(error)
                assert SOURCE in message
                assert "\n" not in message
                assert len(message) < MAX_MESSAGE_CHARS, message
                names = {name for path in places(fields) for name in path}
                assert any(name in message for name in names), message
            else:
                is_list_of_tokens = place == ("eos_token_id",) and value in ([], [1])
                is_of_its_type = None in (old, value) or json_type(old) == json_type(value)
                assert config == expected or is_of_its_type or is_list_of_tokens, (place, value)


@pytest.mark.parametrize("value", [10**9, 2**63])
@pytest.mark.parametrize("case", ABSURD_CASES)
def test_absurd_sizes_are_one_error(case: str, value: int, tmp_path: Path) -> None:
    """Refuse absurd numbers of layers, heads or experts before anything is allocated for each.

    A few cases have a field of another family, which nobody reads.
    """
    write_checkpoint(case, tmp_path)
    expected = read_config(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name in set(written) & set(ABSURD):
        (tmp_path / "config.json").write_text(json.dumps(written | {name: value}))
        try:
            config = read_config(tmp_path)
            load_weights(tmp_path, config, dtype=torch.float32)
        except ModelError:
            continue
        assert config == expected
        assert name in ("num_experts", "num_local_experts")
