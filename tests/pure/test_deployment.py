"""The files in deploy/ fit the server: metrics, options, limits and times are those of the code."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ramify.cli import app
from ramify.cli.options import read_config_file
from ramify.engine.core import CLOSE_LIMIT_S
from ramify.server.http.wire import MAX_BODY_BYTES
from ramify.server.operations.tier_metrics import tier_metrics
from ramify.server.run import CLOSE_S, KEEP_ALIVE_S, ServeOptions
from ramify.server.telemetry import server_telemetry
from tests.pure.cluster_bench import run
from tests.pure.live_server import live
from tests.pure.server_bench import TOOL_TEMPLATE, chat
from tests.pure.test_cluster_server import ClusterServer
from tests.pure.test_tier_metrics import loaded_bench

yaml: Any = pytest.importorskip("yaml")
pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
# After the drain: connections are closed, the last traces sent, pages written to the disk tier.
END_S = CLOSE_S + CLOSE_LIMIT_S + server_telemetry.END_S
METRIC = re.compile(r"\bramify_\w+")
SERVE: Any = typer.main.get_command(app)
OPTIONS = {option for parameter in SERVE.commands["serve"].params for option in parameter.opts}


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def exported() -> dict[str, set[str]]:
    """Every metric of one server, of a cluster and of tiers, with its labels."""
    with live() as server:
        server.ask()
        server.ask(temperature="hot")
        text = server.get("/metrics").text

    async def main() -> str:
        bench = ClusterServer(chat_template=TOOL_TEMPLATE)
        async with bench.serving():
            assert (await bench.post("/v1/chat/completions", chat("Hello"))).status == 200
            return (await bench.call("GET", "/metrics")).body.decode()

    text += "\n" + run(main())
    families: dict[str, set[str]] = {}
    for family in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE):
        families[family] = set()
    for name, labels in re.findall(r"^(ramify_\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
        families.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    for metric in tier_metrics({"": loaded_bench().core.stats()}):
        for sample in metric.samples:
            families.setdefault(sample.name, set()).update(sample.labels)
    return families


def test_every_expression_names_metrics_and_labels_of_the_server() -> None:
    """Dashboard and alerts read what the server exports, by labels that it has."""
    panels = json.loads(read("grafana-dashboard.json"))["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    rules = yaml.safe_load(read("prometheus-rules.yml"))["groups"][0]["rules"]
    expressions += [rule["expr"] for rule in rules if rule["alert"] != "RamifyDown"]
    metrics = exported()

    assert len(expressions) > 40
    for expression in expressions:
        names = METRIC.findall(expression)
        assert names, expression
        labels = {"instance", "le"}
        for name in names:
            assert name in metrics, f"{name} in {expression}"
            labels |= metrics[name]
        grouped = re.findall(r"by \(([\w, ]+)\)", expression)
        selected = re.findall(r"(\w+)=~?\"", expression)
        used = {label.strip() for group in grouped for label in group.split(",")} | set(selected)
        assert used <= labels, expression


def test_the_dashboard_is_written_by_its_script() -> None:
    """deploy/grafana-dashboard.json is what scripts/grafana_dashboard.py writes."""
    code = "import sys; sys.path.insert(0, 'scripts'); import grafana_dashboard as g; print(g.text(), end='')"
    written = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert written.stdout == read("grafana-dashboard.json")


def test_the_configuration_is_read() -> None:
    """deploy/ramify.toml has options of `ramify serve` only."""
    known = {str(parameter.name) for parameter in SERVE.commands["serve"].params}

    values = read_config_file(DEPLOY / "ramify.toml", known - {"config", "help"})

    assert values["kv_cache_tokens"] > 0


@pytest.mark.parametrize("name", ["Dockerfile", "ramify.service", "kubernetes.yaml"])
def test_flags_exist(name: str) -> None:
    """Every flag of `ramify serve` in a file of deploy/ is one."""
    commands = [
        line for line in read(name).splitlines() if "pip" not in line and "kubectl" not in line
    ]
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", "\n".join(commands)))
    of_others = {
        "Dockerfile": {"--no-install-recommends", "--uid", "--no-create-home", "--home-dir", "--from", "--stop-timeout",
                       "--interval", "--timeout", "--start-period", "--retries", "--index-url",
                       "--extra-index-url"},
        "ramify.service": {"--now", "--tenant", "--admin"},
        "kubernetes.yaml": {"--tenant", "--admin"},
    }[name]  # fmt: skip

    assert flags - of_others <= OPTIONS


def options_of(
    args: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> ServeOptions:
    """What `ramify serve` makes of a command line and its environment."""
    seen: list[ServeOptions] = []

    def remember(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("ramify.server.run.serve", remember)
    result = CliRunner().invoke(app, ["serve", *args], env=environment)
    assert result.exit_code == 0, result.output
    [options] = seen
    return options


@pytest.mark.parametrize("name", ["Dockerfile", "ramify.service", "kubernetes.yaml"])
def test_the_keys_of_each_file_go_together(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its flags, and every variable that it names, the server starts with an operator or a tenant."""
    keys = tmp_path / "keys.json"
    for kind in (["--tenant", "ann"], ["--admin"]):
        assert CliRunner().invoke(app, ["keys", str(keys), *kind]).exit_code == 0
    text = read(name)
    if name == "Dockerfile":
        entry = re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
        assert entry
        args = [*json.loads(entry[1])[2:], "smollm2"]
    elif name == "ramify.service":
        command = re.search(r"^ExecStart=\S+ serve (.*)$", text, re.MULTILINE)
        assert command
        args = command[1].replace("/etc/ramify/ramify.toml", str(DEPLOY / "ramify.toml")).split()
    else:
        *_, deployment = yaml.safe_load_all(text)
        args = [*deployment["spec"]["template"]["spec"]["containers"][0]["args"], "--host=0.0.0.0"]
    environment = dict.fromkeys(re.findall(r"RAMIFY_\w+", text), "secret")

    args = [re.sub(r"[^=]*/keys\.json", str(keys), arg) for arg in args]

    options = options_of(args, environment, monkeypatch)

    assert options.keys() is not None


def test_proxies_leave_limits_to_the_server() -> None:
    """Bodies up to the server's limit pass, and a proxy closes idle connections before the server does."""
    nginx, caddy = read("nginx.conf"), read("Caddyfile")
    sizes = re.findall(r"client_max_body_size (\d+)m|max_size (\d+)MiB", nginx + caddy)
    times = re.findall(r"keepalive_timeout (\d+)s|keepalive (\d+)s", nginx + caddy)

    assert len(sizes) == len(times) == 2
    assert all(int("".join(size)) * 2**20 > MAX_BODY_BYTES for size in sizes)
    assert all(int("".join(seconds)) < KEEP_ALIVE_S for seconds in times)


def test_pods_end_after_their_drain() -> None:
    """Probes name routes of the server, and Kubernetes waits for the drain."""
    *_, deployment = yaml.safe_load_all(read("kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = next(int(arg.split("=")[1]) for arg in container["args"] if "drain" in arg)
    paths = {container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}

    with live() as server:
        assert all(server.get(path).status_code == 200 for path in paths)
    assert paths == {"/livez", "/readyz"}
    pre_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pre_stop + drain + END_S
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_unit_ends_after_its_drain() -> None:
    """systemd waits for the drain of deploy/ramify.toml; the unit is one that it can read."""
    unit = read("ramify.service")
    known = {str(parameter.name) for parameter in SERVE.commands["serve"].params}
    values = read_config_file(DEPLOY / "ramify.toml", known)

    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop
    assert int(stop[1]) > values["drain_seconds"] + END_S
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", str(DEPLOY / "ramify.service")]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        lines = [line for line in output.splitlines() if "ramify.service" in line]
        assert [line for line in lines if "is not executable" not in line] == []


def test_rules_are_read_by_prometheus() -> None:
    """`promtool check rules`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    command = [promtool, "check", "rules", str(DEPLOY / "prometheus-rules.yml")]

    checked = subprocess.run(command, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr
