"""Coding agents in print mode against a scripted model; run by `clients.runner`, a process for each.

    python -m clients.agents NAME FOLDER SCRATCH

The model calls the agent's shell tool `NUM_CALLS` times, then ends with a sentence. Checked: each call
ran and its result came back, the agent printed the sentence, and each request read the prompt of the
one before from the cache; then the same for a second turn of the same conversation, in a new process.
HOME is a directory of its own. The process has a network of its own with loopback only, where the
system allows that.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from clients.processes import running_server
from clients.report import case
from clients.scripted_server import NUM_CALLS, STEPS_FILE, step_result

AGENT_S = 240
PAGE_SIZE = 16
# Into a closed port, for programs that would call home where the network cannot be taken away.
CLOSED = "http://127.0.0.1:9"
# A daemon that an agent leaves behind ends with the process.
ISOLATION = "unshare --map-root-user --net --pid --fork --kill-child --mount-proc".split()


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is installed, told of the server, and asked.

    `{url}` in `prepare`, variables and files is the server's address without a path.

    Args:
        packages: what npm or pip installs; the first is the agent.
        program: its name among the installed programs.
        ask, go_on: arguments for a first and a second turn; no second turn if empty.
        postinstall: the shell command of npm's package that completes its installation.
        prepare: arguments of a call before the first turn, that writes its configuration.
        files: texts by path below HOME; those below `work/` lie in the directory in which it runs.
        min_read: share of the prompt before that a request of the loop has to read from the cache.
    """

    installer: str
    packages: tuple[str, ...]
    program: str
    ask: tuple[str, ...]
    go_on: tuple[str, ...] = ()
    prepare: tuple[str, ...] = field(default=(), kw_only=True)
    postinstall: str = field(default="true", kw_only=True)
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    min_read: float = 0.99


ASK, GO_ON = "Run the steps.", "Once more."
CODEX_CONFIG = """\
model = "local"
model_provider = "ramify"
model_context_window = 200000
model_auto_compact_token_limit = 180000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.ramify]
name = "Ramify"
base_url = "{url}/v1"
wire_api = "responses"
"""
OPENCODE_CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "model": "ramify/local",
    "small_model": "ramify/local",
    "provider": {
        "ramify": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {"local": {"limit": {"context": 200_000, "output": 8192}}},
        }
    },
}
QWEN_CONFIG = {
    "general": {"enableAutoUpdate": False, "disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
    "model": {"generationConfig": {"contextWindowSize": 200_000}},
}
OPENAI = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": "local"}
CODEX_FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
AGENTS: Mapping[str, Agent] = {
    "claude_code": Agent(
        "npm",
        ("@anthropic-ai/claude-code",),
        "claude",
        ("-p", ASK, "--allowedTools", "Bash"),
        ("-c", "-p", GO_ON, "--allowedTools", "Bash"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            # Without it the name of a model, in a tool's description, changes with the second turn.
            "ANTHROPIC_MODEL": "local",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        postinstall="node install.cjs",
    ),
    "codex": Agent(
        "npm",
        ("@openai/codex",),
        "codex",
        ("exec", *CODEX_FLAGS, ASK),
        ("exec", *CODEX_FLAGS, "resume", "--last", GO_ON),
        files={".codex/config.toml": CODEX_CONFIG},
    ),
    "opencode": Agent(
        "npm",
        ("opencode-ai",),
        "opencode",
        ("run", ASK),
        ("run", "-c", GO_ON),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {"work/opencode.json": json.dumps(OPENCODE_CONFIG)},
        postinstall="node postinstall.mjs",
    ),
    "qwen_code": Agent(
        "npm",
        ("@qwen-code/qwen-code",),
        "qwen",
        ("--auth-type", "openai", "--yolo", ASK),
        ("--auth-type", "openai", "--yolo", "--continue", GO_ON),
        # It takes no notice of NO_PROXY.
        OPENAI | {"HTTP_PROXY": "", "HTTPS_PROXY": ""},
        {".qwen/settings.json": json.dumps(QWEN_CONFIG)},
    ),
    "cline": Agent(
        "npm",
        ("cline",),
        "cline",
        ("-P", "openai", "-m", "local", "-k", "none", ASK),
        prepare=("auth", "-p", "openai", "-m", "local", "-k", "none", "-b", "{url}/v1"),
        environment={"CLINE_TELEMETRY_DISABLED": "1"},
    ),
    # It has no tools: its loop is an edit, a test that fails, and the next edit. The file's text stands before
    # the messages of the task, so that the request after an edit reads the prompt before up to that text.
    "aider": Agent(
        "pip",
        ("aider-chat",),
        "aider",
        (
            "--model", "openai/local", "--edit-format", "whole", "--yes-always", "--no-git",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings",
            "--test-cmd", "sh step.sh", "--auto-test",
            "--message", f"Write the steps into {STEPS_FILE}.", STEPS_FILE,
        ),
        environment={
            "OPENAI_API_KEY": "none",
            "OPENAI_API_BASE": "{url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        files={
            "work/step.sh": f"n=$(cat {STEPS_FILE}); echo step $n gives $((n * 1001)); exit 1\n"
        },
        min_read=0.5,
    ),
}  # fmt: skip


def install_commands(agent: Agent, folder: Path, python: Sequence[str]) -> list[list[str]]:
    """The commands that install an agent into a folder; of npm's packages only the agent's own script runs.

    Args:
        python: an interpreter's arguments that make a virtual environment, but for its folder.
    """
    if agent.installer == "npm":
        flags = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
        install = ["npm", "install", "--silent", "--prefix", str(folder), *flags, *agent.packages]
        package = folder / "node_modules" / agent.packages[0]
        return [install, ["sh", "-c", f"cd '{package}' && {agent.postinstall}"]]
    pip = [str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    return [[*python, str(folder)], [*pip, "install", *agent.packages]]


def version(agent: Agent, folder: Path) -> str:
    """Name and version of an installed agent."""
    package = agent.packages[0]
    if agent.installer == "npm":
        text = (folder / "node_modules" / package / "package.json").read_text("utf-8")
        return f"{package} {json.loads(text)['version']}"
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    command = [str(folder / "bin" / "python"), "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"{package} {output.stdout.strip()}"


def isolation() -> list[str]:
    """The command's beginning that takes all networks but loopback away; empty if that is not allowed."""
    try:
        probe = subprocess.run([*ISOLATION, "true"], capture_output=True, check=False)
    except OSError:
        return []
    return [] if probe.returncode else ISOLATION


def start_loopback() -> None:
    """Bring up loopback, which is down in a network of one's own; nothing happens where it is up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
        try:
            fcntl.ioctl(control, 0x8914, request)  # SIOCSIFFLAGS
        except PermissionError:
            return


class Session:
    """An agent's HOME and directory, and the record of the server that it calls."""

    def __init__(self, agent: Agent, folder: Path, scratch: Path, url: str) -> None:
        self._agent, self._url = agent, url
        self._record, self._output = scratch / "record", scratch / "output"
        self._seen = 0
        self._work = scratch / "work"
        self._work.mkdir()
        for path, text in agent.files.items():
            file = scratch / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self._filled(text), "utf-8")
        programs = folder / ("node_modules/.bin" if agent.installer == "npm" else "bin")
        self._program = str(programs / agent.program)
        self._environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(scratch),
            "HTTP_PROXY": CLOSED,
            "HTTPS_PROXY": CLOSED,
            "NO_PROXY": "127.0.0.1,localhost",
            "DO_NOT_TRACK": "1",
            "NO_COLOR": "1",
        } | {name: self._filled(value) for name, value in agent.environment.items()}

    def _filled(self, text: str) -> str:
        return text.replace("{url}", self._url)

    def prepare(self) -> None:
        """Let the agent write its configuration, if it does."""
        if self._agent.prepare:
            arguments = [self._filled(text) for text in self._agent.prepare]
            self._run(arguments)

    def turn(self, arguments: Sequence[str]) -> list[dict[str, Any]]:
        """Run the agent once; returns the requests of its main loop.

        Raises:
            RuntimeError: it failed, or did not print the last sentence.
        """
        exit_code, output = self._run(arguments)
        if exit_code or f"Done: {step_result(NUM_CALLS)}." not in output:
            raise RuntimeError(f"exit code {exit_code}: {output.strip()[-300:]!r}")
        lines = self._record.read_text("utf-8").splitlines()
        requests = [json.loads(line) for line in lines[self._seen :]]
        self._seen = len(lines)
        return [request for request in requests if request["is_loop"]]

    def _run(self, arguments: Sequence[str]) -> tuple[int, str]:
        """The agent's exit code and output. A file, since a daemon it leaves would keep a pipe open."""
        with self._output.open("wb") as out:
            result = subprocess.run(
                [self._program, *arguments], cwd=self._work, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False, timeout=AGENT_S,
            )  # fmt: skip
        return result.returncode, self._output.read_text("utf-8", "replace")


def check_loop(requests: Sequence[Mapping[str, Any]]) -> str:
    """Check that each call's result came back, once; returns the prompts' lengths."""
    steps = [request["step"] for request in requests]
    assert steps == list(range(NUM_CALLS + 1)), f"steps {steps}"
    lengths = ", ".join(f"{request['prompt']:,}" for request in requests)
    return f"{NUM_CALLS} calls; prompts of {lengths} tokens"


def check_reads(requests: Sequence[Mapping[str, Any]], min_read: float) -> str:
    """Check what each request read of the prompt before; returns the counts."""
    for before, request in itertools.pairwise(requests):
        wanted = min_read * before["prompt"] - PAGE_SIZE
        assert request["read"] >= wanted, f"{request['read']} of {before['prompt']}: {request}"
    return "read " + ", ".join(f"{r['read']:,} of {r['prompt']:,}" for r in requests[1:])


def main() -> None:
    """Run the agent of the command line; prints a line `RESULT JSON` for each case."""
    name, folder, scratch = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    agent = AGENTS[name]
    requests: list[dict[str, Any]] = []
    start_loopback()
    with running_server(("clients.scripted_server",), scratch, str(scratch / "record")) as url:
        session = Session(agent, folder, scratch, url)
        session.prepare()

        @case("tool loop")
        def _() -> str:
            requests.extend(session.turn(agent.ask))
            return check_loop(requests)

        @case("cached tokens of the loop")
        def _() -> str:
            assert len(requests) > 1, "there was no loop"
            return check_reads(requests, agent.min_read)

        if agent.go_on:

            @case("second turn")
            def _() -> str:
                # An agent may send requests of its own beside the conversation's.
                longest = max(session.turn(agent.go_on), key=itemgetter("read"))
                return check_reads([*requests[-1:], longest], agent.min_read)


if __name__ == "__main__":
    main()
