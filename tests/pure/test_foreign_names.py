"""Names of options in other engines: each is answered by what is used here in its place."""

import copy
import dataclasses
import pickle
import re
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import ramify
from ramify.cli import app
from ramify.cli.options import read_config_file
from ramify.cli.usage_errors import advice_for
from ramify.config import EngineConfig
from ramify.engine.text.prompt_inputs import encode_chat
from ramify.errors import ConfigError, RequestError, UnknownOptionError, UnknownParamError
from ramify.foreign_names import (
    CALL_NAMES,
    ENGINE_NAMES,
    PARAM_NAMES,
    SHORT_FLAGS,
    flag_advice,
    python_advice,
)
from ramify.params import SAMPLING_FIELDS, SamplingParams

OPTIONS = {
    option.name
    for section in dataclasses.fields(EngineConfig)
    for option in dataclasses.fields(section.default_factory)  # type: ignore[arg-type]
}
# Options of `serve`, arguments of calls, and other words that advice names beside them.
OTHER_WORDS = {
    "served_model_name",
    "generation_config",
    "log_format",
    "priority",
    "prompt",
    "prompt_file",
    "params",
    "progress",
}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_seq_len", "use max_model_len"),
        ("n_ctx", "use max_model_len"),
        ("context_length", "use max_model_len"),
        ("gpu_memory_utilization", "use kv_cache_tokens or kv_cache_memory"),
        ("mem_fraction_static", "use kv_cache_tokens or kv_cache_memory"),
        ("max_num_batched_tokens", "use max_batch_tokens"),
        ("enable_prefix_caching", "on by default"),
        ("disable_radix_cache", "prefix_cache=False"),
        ("pipeline_parallel_size", "not served yet; tensor_parallel_size"),
        ("tp_size", "use tensor_parallel_size"),
        ("device_map", "runs on CPU"),
        ("n_gpu_layers", "runs on CPU"),
        ("quantization", "use quantize"),
        ("hicache_size", "use cache_dir"),
        ("max_num_queued_reqs", "use max_waiting"),
        ("torch_dtype", "use dtype"),
        ("trust_remote_code", "never run"),
        ("temperature", "give it to SamplingParams"),
        ("max_new_tokens", "of SamplingParams; use max_tokens"),
    ],
)
def test_an_option_of_another_engine_names_ours(name: str, ours: str) -> None:
    """One sentence, without the list of all options; a ConfigError as for any unknown option."""
    with pytest.raises(UnknownOptionError) as caught:
        EngineConfig.of(**{name: 1})

    message = str(caught.value)
    assert message.startswith(f"unknown option {name!r}: ")
    assert ours in message
    assert "the options are" not in message
    assert caught.value.known


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("n_predict", "use max_tokens"),
        ("guided_json", "use structured=StructuredOutput(json_schema=...)"),
        ("best_of", "use n"),
        ("do_sample", "use temperature; 0 is greedy"),
        ("skip_special_tokens", "use keep_special_tokens"),
        ("repeat_penalty", "use repetition_penalty"),
        ("use_beam_search", "there is no beam search here"),
    ],
)
def test_a_parameter_of_another_engine_names_ours(name: str, ours: str) -> None:
    """It is a TypeError, as an unknown argument is in Python, and an error of the request."""
    with pytest.raises(UnknownParamError) as caught:
        SamplingParams(**{name: 1})  # type: ignore[arg-type]

    assert str(caught.value) == f"SamplingParams has no {name!r}: {ours}"
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RequestError)


def test_an_unknown_parameter_lists_the_parameters() -> None:
    """A name that no engine has is answered by all of ours."""
    with pytest.raises(UnknownParamError, match="has no 'temprature'; the parameters are temp"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_parameters_are_still_copied_and_pickled() -> None:
    """The check of names is part of construction only."""
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.0})

    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, temperature=0.5) == params


def test_a_subclass_may_have_parameters_of_its_own() -> None:
    """Its names are known too, and only its own."""

    @dataclasses.dataclass(frozen=True)
    class Mine(SamplingParams):
        label: str = ""

    assert Mine(temperature=0.5, label="a").label == "a"
    with pytest.raises(UnknownParamError, match=r"Mine has no 'lable'; .*, label$"):
        Mine(lable="a")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("sampling_params", "use params"),
        ("use_tqdm", "use progress"),
        ("max_tokens", "give it to SamplingParams"),
        ("max_new_tokens", "use max_tokens"),
    ],
)
def test_a_chat_takes_no_sampling_parameter_for_a_variable_of_its_template(
    name: str, ours: str
) -> None:
    """Templates ignore variables that they do not know, so such an argument would do nothing."""
    with pytest.raises(UnknownParamError, match=f"chat has no '{name}': .*{ours}"):
        encode_chat([{"role": "user", "content": "x"}], None, **{name: 5})


def test_advice_names_only_what_exists() -> None:
    """Each name in backticks is an option, a parameter, or one of a few other words."""
    known = OPTIONS | SAMPLING_FIELDS | OTHER_WORDS
    for table in (ENGINE_NAMES, PARAM_NAMES, CALL_NAMES, SHORT_FLAGS):
        for name, advice in table.items():
            assert advice, name
            for word in re.findall(r"`(\w+)[`=]", advice):
                assert word in known, (name, word)


def test_no_name_of_ours_is_foreign() -> None:
    """The tables hold no option or parameter that exists."""
    assert not OPTIONS & ENGINE_NAMES.keys()
    assert not SAMPLING_FIELDS & PARAM_NAMES.keys()


def test_advice_has_flags_on_the_command_line() -> None:
    """A name becomes a flag, False its opposite; Python's form has no backticks."""
    assert flag_advice("use `max_num_seqs`") == "use --max-num-seqs"
    assert flag_advice("`prefix_cache=False` turns it off") == "--no-prefix-cache turns it off"
    assert flag_advice("`dtype=bfloat16`") == "--dtype bfloat16"
    assert python_advice("`prefix_cache=False`") == "prefix_cache=False"


@pytest.mark.parametrize(
    ("command", "flag", "ours"),
    [
        ("serve", "--pipeline-parallel-size", "not served yet"),
        ("serve", "--max-seq-len", "use --max-model-len"),
        ("serve", "--n-ctx", "use --max-model-len"),
        ("serve", "-c", "use --max-model-len"),
        ("serve", "-ngl", "runs on CPU"),
        ("serve", "--gpu-memory-utilization", "use --kv-cache-tokens or --kv-cache-memory"),
        ("serve", "--enable-prefix-caching", "--no-prefix-cache turns it off"),
        ("serve", "--no-enable-prefix-caching", "--no-prefix-cache turns it off"),
        ("serve", "--device-map", "runs on CPU"),
        ("serve", "--quantization", "use --quantize"),
        ("serve", "--model", "the model is the first argument"),
        ("serve", "--model-path", "the model is the first argument"),
        ("serve", "--data-parallel-size", "--replicas N"),
        ("serve", "--slot-save-path", "use --cache-dir"),
        ("serve", "--scheduling-policy", "each request has a priority"),
        ("serve", "--max-new-tokens", "a parameter of each request; use max_tokens"),
        ("serve", "--temperature", "a parameter of each request: temperature"),
        ("generate", "--max-new-tokens", "use --max-tokens"),
        ("generate", "-n", "use --max-tokens"),
        ("generate", "-p", "use --prompt"),
        ("chat", "--ctx-size", "use --max-model-len"),
        ("info", "--device-map", "runs on CPU"),
    ],
)
def test_a_flag_of_another_engine_names_ours(command: str, flag: str, ours: str) -> None:
    """In place of the flag with the most similar letters."""
    result = CliRunner().invoke(app, [command, flag, "1"], env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert f"{flag}: " in result.output
    assert ours in result.output
    assert "Possible options" not in result.output


def test_a_misspelt_flag_still_suggests_the_similar_one() -> None:
    """What no engine has is answered as before; so is a flag of a command without an engine."""
    misspelt = CliRunner().invoke(app, ["serve", "--pagesize", "3"], env={"COLUMNS": "300"})
    other = CliRunner().invoke(app, ["lint", "--device-map", "3"], env={"COLUMNS": "300"})

    assert "--page-size" in misspelt.output
    assert "runs on CPU" not in other.output
    assert other.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["srve"], "No such command 'srve'. Did you mean 'serve'?"),
        (["frobnicate"], "No such command 'frobnicate'. The commands: serve, replica, deploy,"),
        (["cache", "lst"], "No such command 'lst'. Did you mean 'ls'?"),
        (["cache", "empty"], "No such command 'empty'. The commands: ls, verify, export, import,"),
    ],
)
def test_an_unknown_command_is_answered_with_those_that_exist(
    arguments: list[str], answer: str
) -> None:
    """The most similar command, or all; exit code 2."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert answer in result.output


def test_an_option_before_the_command_is_no_unknown_command() -> None:
    """It is answered as an option."""
    result = CliRunner().invoke(app, ["--page-size", "3"], env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert "No such option: --page-size" in result.output


@pytest.mark.parametrize(
    ("flag", "value", "answer"),
    [
        (
            "--quantize",
            "int3",
            "Invalid value for '--quantize': 'int3' is not one of 'off', 'int8'",
        ),
        ("--page-size", "x", "Invalid value for '--page-size': 'x' is no whole number"),
        ("--port", "70000", "Invalid value for '--port': '70000' is too large; at most 65535 is"),
        ("--port", "-1", "Invalid value for '--port': '-1' is too small; at least 0 is possible"),
        ("--drain-seconds", "soon", "Invalid value for '--drain-seconds': 'soon' is no number"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_possible(flag: str, value: str, answer: str) -> None:
    """In our words, not in those of the library that checks values."""
    result = CliRunner().invoke(app, ["serve", flag, value], env={"COLUMNS": "300"})

    assert result.exit_code == 2
    assert answer in result.output


def test_no_flag_of_serve_is_answered_as_foreign() -> None:
    """Every flag that `serve` has is none of the table."""
    group = typer.main.get_command(app)
    params = group.commands["serve"].params  # type: ignore[attr-defined]
    names = {param.name for param in params}

    foreign = [name for name in names - {"model"} if name in ENGINE_NAMES]

    assert not foreign
    assert advice_for("--nothing-like-it", names) == ""


def test_a_config_file_with_a_foreign_name_names_ours(tmp_path: Path) -> None:
    """As the flag would."""
    file = tmp_path / "ramify.toml"
    file.write_text("max-num-batched-tokens = 512\n")

    with pytest.raises(ConfigError, match="'max-num-batched-tokens': use max_batch_tokens"):
        read_config_file(file, {"max_batch_tokens"})


def test_the_version_is_an_option() -> None:
    """`ramify --version` prints it."""
    result = CliRunner().invoke(app, ["--version"])

    assert result.output == f"ramify {ramify.__version__}\n"
    assert result.exit_code == 0
