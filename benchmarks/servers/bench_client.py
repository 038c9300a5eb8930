"""`vllm bench serve` in a process that runs many benchmarks: importing vLLM takes longer than a short run.

Run as `python -m servers.bench_client` in vLLM's environment. It reads JSON lines:

    {"run": [...]}       arguments of `vllm bench serve`; answers its result
    {"prompts": [...]}   the same arguments; answers the prompts that it would send, as token ids
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from engines.json_process import JsonProcess, ProcessGoneError, TooSlowError

BENCHMARKS = Path(__file__).parents[1]
IMPORT_S = 120.0


class BenchClient:
    """The process, from the side of the benchmark."""

    def __init__(self, python: Path, threads: int) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(BENCHMARKS),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._command = [str(python), "-m", "servers.bench_client"]
        self._environment = environment
        self._process = self._start()
        self.version: str = self._process.ask(IMPORT_S, {"version": True})["version"]

    def _start(self) -> JsonProcess:
        return JsonProcess(self._command, self._environment, BENCHMARKS)

    def run(self, arguments: list[str], limit_s: float) -> dict[str, Any]:
        """The result that `vllm bench serve` would write to its file.

        Raises:
            RuntimeError: it failed.
            TooSlowError: it took longer than `limit_s`; it is ended, its requests with it.
        """
        return self._ask({"run": arguments}, limit_s)

    def prompts(self, arguments: list[str], limit_s: float) -> list[list[int]]:
        """The prompts of `run` with these arguments."""
        prompts: list[list[int]] = self._ask({"prompts": arguments}, limit_s)["prompts"]
        return prompts

    def _ask(self, command: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            answer = self._process.ask(limit_s, command)
        except (ProcessGoneError, TooSlowError):
            self._process = self._start()
            self._process.ask(IMPORT_S, {"version": True})
            raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.end()


def main() -> None:
    """Answer commands; see the top of this file."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    serve: Any = importlib.import_module("vllm.benchmarks.serve")
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if "version" in command:
                answer = {"version": importlib.import_module("vllm").__version__}
            elif "run" in command:
                answer = serve.main(parser.parse_args(command["run"]))
                answer["failed"] = [text for text in answer.pop("errors", []) if text][:3]
                for name in ("input_lens", "output_lens", "start_times", "ttfts"):
                    answer.pop(name, None)
                answer.pop("generated_texts", None)
            else:
                answer = {"prompts": prompts(serve, parser.parse_args(command["prompts"]))}
        except Exception as error:  # noqa: BLE001  # the next benchmark may work
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        out.write(json.dumps(answer, default=str) + "\n")
        out.flush()


def prompts(serve: Any, arguments: Any) -> list[list[int]]:
    """What `vllm bench serve` draws: cut as it cuts, so that a prompt has the length it was meant to have."""
    random.seed(arguments.seed)
    importlib.import_module("numpy").random.seed(arguments.seed)
    tokenizer = serve.get_tokenizer(arguments.tokenizer)
    requests = serve.get_samples(arguments, tokenizer)
    ids = [tokenizer.encode(request.prompt, add_special_tokens=False) for request in requests]
    if len(ids[0]) == requests[0].prompt_len:
        return ids
    return [prompt[: request.prompt_len] for prompt, request in zip(ids, requests, strict=True)]


if __name__ == "__main__":
    main()
