"""The file of `ramify deploy`, and what needs no Ray."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from msgspec import Struct

from ramify.cli import app
from ramify.config import SECTIONS as ENGINE_SECTIONS
from ramify.deploy.config import (
    SECTIONS,
    DeployConfig,
    Ingress,
    Replicas,
    config_of,
    read_config,
)
from ramify.deploy.scaling import NUM_REQUESTS, WAIT_S, WaitPolicy, replicas_for
from ramify.errors import ConfigError, MissingPackageError, UnknownOptionError

ROOT = Path(__file__).resolve().parents[2]
FULL: dict[str, Any] = {
    "name": "chat",
    "model": "ramify-tiny",
    "engine": {"kv-cache-tokens": 4096, "exact": True},
    "replicas": {"min": 2, "max": 4},
    "resources": {"cpus": 2, "threads": 1},
    "scaling": {"wait_s": 1.5},
    "ingress": {"port": 8080, "served-model-name": ["a", "b"]},
    "drain_s": 5,
}
YAML = """
name: chat
model: ramify-tiny
engine: {kv-cache-tokens: 4096, exact: true}
replicas: {min: 2, max: 4}
resources:
  cpus: 2
  threads: 1
scaling:
  wait_s: 1.5
ingress:
  port: 8080
  served-model-name: [a, b]
drain_s: 5
"""


def test_names_are_those_of_the_command_line(tmp_path: Path) -> None:
    """JSON and YAML describe the same; `-` and `_` are equal in names."""
    pytest.importorskip("yaml")
    as_json, as_yaml = tmp_path / "a.json", tmp_path / "a.yaml"
    as_json.write_text(json.dumps(FULL))
    as_yaml.write_text(YAML)

    config = read_config(as_json)

    assert config == read_config(as_yaml)
    assert config.engine == {"kv_cache_tokens": 4096, "exact": True}
    assert (config.min_replicas, config.max_replicas) == (2, 4)
    assert config.resources.num_threads == 1
    assert config.ingress.served_model_name == ["a", "b"]


def test_an_empty_file_is_one_engine_of_the_tiny_model(tmp_path: Path) -> None:
    """Every field has a default; a number of replicas is a fixed one."""
    pytest.importorskip("yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")

    assert read_config(tmp_path / "empty.yaml") == DeployConfig()
    assert config_of({"replicas": 3}).max_replicas == 3
    assert config_of({"replicas": {"max": 2}}).replicas == Replicas(min=1, max=2)
    assert config_of({"resources": {"cpus": 2.5}}).resources.num_threads == 2
    assert config_of({"resources": {"cpus": 0.5}}).resources.num_threads == 1


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ({"replica": 2}, ("'replica'", "replicas", "ingress")),
        ({"ingress": {"prot": 1}}, ("'ingress.prot'", "ingress.port")),
        ({"replicas": {"least": 1}}, ("'replicas.least'", "replicas.min")),
        ({"tls": {"cert": "a"}}, ("'tls.cert'", "tls.certificate")),
        ({"engine": {"kv_cache_token": 1}}, ("'kv_cache_token'", "kv_cache_tokens")),
        ({"tensor_parallel": 2}, ("'tensor_parallel'", "one process", "resources.threads")),
        ({"resources": {"tensor-parallel-size": 2}}, ("tensor-parallel-size", "one process")),
        ({"autoscaling_config": {}}, ("'autoscaling_config'", "`scaling`")),
    ],
)
def test_unknown_names_are_refused_by_name(document: object, names: tuple[str, ...]) -> None:
    """With what there is, or what to use in its place."""
    with pytest.raises(UnknownOptionError) as info:
        config_of(document)

    for name in names:
        assert name in str(info.value)


@pytest.mark.parametrize(
    ("document", "names"),
    [
        ([], ("mapping", "list")),
        ({"replicas": 0}, ("replicas.min is 0", "1..1024")),
        ({"engine": {"tensor_parallel_size": 2}}, ("tensor_parallel_size is 2", "one process")),
        ({"replicas": {"min": 3, "max": 2}}, ("replicas.max is 2", "3..1024")),
        ({"replicas": "two"}, ("$.replicas",)),
        ({"ingress": {"port": 0}}, ("ingress.port is 0", "1..65535")),
        ({"ingress": {"count": 0}}, ("ingress.count is 0",)),
        ({"ingress": {"routing_stride": 0}}, ("ingress.routing_stride is 0", "1 or more")),
        (
            {"ingress": {"prompt_rules": ["date"]}},
            ("ingress.prompt_rules: ", "'date'", "date-line"),
        ),
        ({"ingress": {"port": "http"}}, ("`int`", "$.ingress.port")),
        ({"resources": {"threads": 0}}, ("resources.threads is 0", "1..1024")),
        ({"resources": {"cpus": -1}}, ("resources.cpus is -1", "0 or more")),
        ({"resources": {"cpus": float("nan")}}, ("resources.cpus is nan",)),
        ({"scaling": {"wait_s": 0}}, ("scaling.wait_s is 0",)),
        ({"drain_s": -1}, ("drain_s is -1",)),
        ({"name": "Chat room"}, ("'Chat room'", "a-z")),
        ({"engine": {"model": "other"}}, ("engine.model", "beside")),
        ({"engine": {"page_size": 0}}, ("page_size",)),
        ({"engine": 3}, ("$.engine",)),
        ({"model": 3}, ("$.model",)),
        ({"tls": {"certificate": "a", "key": "b"}}, ("`authority`", "$.tls")),
    ],
)
def test_wrong_values_are_refused(document: object, names: tuple[str, ...]) -> None:
    """With their name and limits."""
    with pytest.raises(ConfigError) as info:
        config_of(document)

    for name in names:
        assert name in str(info.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Not there, or no YAML or JSON."""
    pytest.importorskip("yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("replicas: [")
    other = tmp_path / "broken.json"
    other.write_text("{")

    for path in (tmp_path / "missing.yaml", broken, other):
        with pytest.raises(ConfigError, match=path.name):
            read_config(path)


def test_without_yaml_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON needs nothing more."""
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "yaml", None)

    assert read_config(tmp_path / "a.json") == DeployConfig()
    with pytest.raises(MissingPackageError, match=r"pip install 'ramify\[ray\]'"):
        read_config(tmp_path / "a.yaml")


def test_engines_follow_the_work_that_waits() -> None:
    """Seconds of waiting work and requests each ask for engines; the larger number counts."""
    loads = [(0.0, 0), (2.0, 32), (9.0, 10), (0.1, 65)]

    counts = [replicas_for(*load, max_wait_s=2.0, per_replica=32) for load in loads]

    assert counts == [1, 1, 5, 3]


def test_the_policy_adds_up_what_engines_report() -> None:
    """It changes nothing before the first report."""
    policy = WaitPolicy(max_wait_s=1.0, per_replica=10)
    reports = {WAIT_S: {"a": 1.5, "b": 1.0}, NUM_REQUESTS: {"a": 4.0, "b": 2.0}}

    def target(metrics: object) -> int:
        return policy(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=7))[0]

    assert target(reports) == 3
    assert target({}) == 7
    assert target(None) == 7


# Options of `ramify serve` that servers of a deployment do not have, and why.
NOT_INGRESS = {
    "more_names": "`served_model_name` is a list",
    "api_key": "a file that is copied to nodes holds no key: `api_key_file` has their hashes",
    "admin_key": "as `api_key`; the key file says which keys are an operator's",
    "drain_seconds": "`drain_s`",
    "log_format": "`log_json`",
    "log_file": "Ray collects what its processes print",
    "threads_per_replica": "`resources.threads`",
    "cluster_secret": "`secret_file`",
    "cluster_certificate": "`tls.certificate`",
    "cluster_key": "`tls.key`",
    "cluster_authority": "`tls.authority`",
    "cluster_certificate_name": "`tls.name`",
    "record": "several servers of a node would append to the same file",
    "record_tokens": "as `record`",
    "batch_dir": "one server uses a directory, and Ray moves servers to other nodes",
    "batch_disk": "as `batch_dir`",
    **dict.fromkeys(
        ("kv_events", "kv_events_replay", "kv_events_topic", "kv_events_form", "kv_events_tiers"),
        "they tell routers outside what each engine has cached, and Ray chooses where engines are",
    ),
}


def test_servers_of_a_deployment_have_the_options_of_the_command() -> None:
    """Each is a field of the file, or is left out for a reason."""
    command: Any = typer.main.get_command(app)
    flags = {flag.name for flag in command.commands["serve"].params} - {"config", "help"}
    engine = {field.name for section in ENGINE_SECTIONS.values() for field in fields(section)}
    known = {*DeployConfig.__struct_fields__, *Ingress.__struct_fields__}

    assert flags - engine - known == NOT_INGRESS.keys()


def test_the_page_has_every_field() -> None:
    """Of the file and its sections."""
    page = (ROOT / "docs" / "cluster.md").read_text("utf-8").partition("## On Ray")[2]

    sections: list[type[Struct]] = [DeployConfig, *SECTIONS.values()]
    for section in sections:
        for field in section.__struct_fields__:
            assert f"`{field}`" in page, field


def test_the_example_for_kubernetes_is_a_deployment() -> None:
    """Its `args` are checked as the command checks a file."""
    yaml = pytest.importorskip("yaml")
    service = yaml.safe_load((ROOT / "examples" / "kuberay" / "ramify.yaml").read_text("utf-8"))
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])

    [application] = serve["applications"]
    config = config_of(application["args"])

    assert application["import_path"] == "ramify.deploy.ray_serve:build"
    assert config.ingress.haproxy
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}


def test_only_one_file_knows_ray() -> None:
    """Its name says so."""
    source = Path(sys.modules["ramify"].__file__ or "").parent
    files = [path.name for path in source.rglob("*.py") if "import ray" in path.read_text("utf-8")]

    assert files == ["ray_serve.py"]


def test_the_file_is_checked_without_torch_and_without_ray() -> None:
    """Importing the package loads neither."""
    code = (
        "import sys, ramify.deploy.config, ramify.deploy.scaling, ramify.cli.deploy;"
        "print(sorted({'torch', 'ray', 'grpc', 'uvicorn'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
