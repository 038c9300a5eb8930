"""Sampling parameters that a request omits come from the checkpoint's `generation_config.json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import CheckpointError, ConfigError
from ramify.models.configs.sampling_defaults import SamplingDefaults, read_sampling_defaults
from ramify.params import SamplingParams
from tests.pure.server_bench import Answer, ServerBench, run

pytest.importorskip("starlette")

FROM_FILE = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
}
FROM_API = {
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
MESSAGES = [{"role": "user", "content": "x"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
}


def write_file(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def read(folder: Path, **fields: Any) -> SamplingDefaults:
    return read_sampling_defaults("auto", write_file(folder, **fields))


def sampled(path: str, fields: dict[str, Any], defaults: SamplingDefaults) -> dict[str, Any]:
    """The sampling parameters that a request with `fields` runs with."""

    async def main() -> SamplingParams:
        async with ServerBench(sampling_defaults=defaults).running() as bench:
            answer = await bench.post(path, BODIES[path] | fields)
            assert answer.status == 200, answer.body
            return bench.ended[-1].request.params

    params = run(main())
    return {name: getattr(params, name) for name in FROM_FILE}


@pytest.mark.parametrize("path", BODIES)
def test_what_a_request_omits_is_taken_from_the_file(path: str, tmp_path: Path) -> None:
    """Each of the five, at every endpoint that samples; an explicit null counts as omitted."""
    defaults = read(tmp_path, **FROM_FILE)

    assert sampled(path, {}, defaults) == FROM_FILE
    assert sampled(path, {"temperature": None, "top_p": None}, defaults) == FROM_FILE
    assert sampled(path, {}, SamplingDefaults()) == FROM_API


@pytest.mark.parametrize("path", BODIES)
def test_each_parameter_of_a_request_wins_alone(path: str, tmp_path: Path) -> None:
    """A request with a temperature keeps the file's other parameters; 1 and 0 are values too."""
    defaults = read(tmp_path, **FROM_FILE)

    assert sampled(path, {"temperature": 0}, defaults) == FROM_FILE | {"temperature": 0.0}
    assert sampled(path, {"top_p": 1}, defaults) == FROM_FILE | {"top_p": 1.0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_request_turns_the_filters_of_the_file_off(path: str, tmp_path: Path) -> None:
    """`top_k` 0 and -1, `min_p` 0 and `repetition_penalty` 1 are no omissions."""
    defaults = read(tmp_path, **FROM_FILE)
    off = {"min_p": 0, "repetition_penalty": 1}

    for top_k in (0, -1):
        params = sampled(path, {"top_k": top_k} | off, defaults)

        assert params == FROM_API | {"temperature": 0.6, "top_p": 0.95}


def test_a_response_names_the_values_that_it_was_sampled_with(tmp_path: Path) -> None:
    """`temperature` and `top_p` of a Response are the file's where the request omits them."""

    async def main() -> Answer:
        async with ServerBench(sampling_defaults=read(tmp_path, **FROM_FILE)).running() as bench:
            return await bench.post("/v1/responses", BODIES["/v1/responses"])

    body = run(main()).json

    assert (body["temperature"], body["top_p"]) == (0.6, 0.95)


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
def test_the_models_name_the_defaults(headers: dict[str, str], tmp_path: Path) -> None:
    """`/v1/models` has the values and the file's name, without its directory."""

    async def listed(defaults: SamplingDefaults) -> Any:
        async with ServerBench(sampling_defaults=defaults).running() as bench:
            answer = await bench.call("GET", "/v1/models", headers=headers)
            return answer.json["data"][0]

    entry = run(listed(read(tmp_path, **FROM_FILE)))
    entry_of_none = run(listed(SamplingDefaults()))

    assert entry["default_sampling_params"] == FROM_FILE
    assert entry["generation_config"] == "generation_config.json"
    assert entry_of_none["default_sampling_params"] == FROM_API
    assert entry_of_none["generation_config"] is None


def test_null_and_absent_fields_leave_the_defaults_of_the_apis(tmp_path: Path) -> None:
    """A file without sampling parameters, or with null in them, changes nothing."""
    defaults = read(tmp_path, temperature=None, top_k=None, eos_token_id=2)

    assert defaults.values() == FROM_API


def test_values_that_turn_a_filter_off_are_read_as_such(tmp_path: Path) -> None:
    """`top_k` 0 and -1 are off; temperature 0 is greedy, as is `top_p` 0."""
    assert read(tmp_path, top_k=0).top_k is None
    assert read(tmp_path, top_k=-1).top_k is None
    assert read(tmp_path, temperature=0).temperature == 0
    assert read(tmp_path, top_p=0).top_p == 1e-9


def test_do_sample_is_ignored(tmp_path: Path) -> None:
    """As in vLLM: with `do_sample: false` requests sample by the file's temperature."""
    assert read(tmp_path, do_sample=False, temperature=0.6).temperature == 0.6
    assert read(tmp_path, do_sample=False).temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", True),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_p", 1.5),
        ("top_p", False),
        ("top_k", 2.5),
        ("top_k", [20]),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", {}),
    ],
)
def test_a_value_that_is_not_possible_is_an_error(field: str, value: Any, tmp_path: Path) -> None:
    """It names the file, the field, what is allowed and the way out, in one line."""
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **{field: value})

    message = str(caught.value)
    assert str(tmp_path / "generation_config.json") in message
    assert f": {field} is " in message
    assert "--generation-config none" in message
    assert "\n" not in message
    assert len(message) < 600


def test_another_directory_may_have_the_file(tmp_path: Path) -> None:
    """`none` reads no file, a directory reads its own; one without the file is an error."""
    checkpoint, other = tmp_path / "checkpoint", tmp_path / "other"
    checkpoint.mkdir()
    other.mkdir()
    write_file(checkpoint, temperature=0.6)
    write_file(other, temperature=0.2)

    assert read_sampling_defaults("auto", checkpoint).temperature == 0.6
    assert read_sampling_defaults("none", checkpoint) == SamplingDefaults()
    assert read_sampling_defaults(str(other), checkpoint).temperature == 0.2
    assert read_sampling_defaults("auto", tmp_path) == SamplingDefaults()
    with pytest.raises(ConfigError, match=r"there is no .*generation_config.json"):
        read_sampling_defaults(str(tmp_path), checkpoint)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    """What is no JSON object is refused by the file's name."""
    (tmp_path / "generation_config.json").write_text("[]")

    with pytest.raises(CheckpointError, match=r"generation_config.json holds list"):
        read_sampling_defaults("auto", tmp_path)


def test_the_summary_says_what_the_file_sets(tmp_path: Path) -> None:
    """The startup banner and `ramify info` show it."""
    assert read(tmp_path, temperature=0.6, top_k=20).summary() == (
        f"temperature 0.6, top_k 20 ({tmp_path / 'generation_config.json'})"
    )
    assert SamplingDefaults().summary() == "temperature 1 (without a generation_config.json)"


def test_sampling_params_of_python_stay_as_they_are() -> None:
    """`SamplingParams()` is greedy whatever a checkpoint says."""
    params = SamplingParams()

    assert {name: getattr(params, name) for name in FROM_FILE} == FROM_API | {"temperature": 0.0}
