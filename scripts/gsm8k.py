"""GSM8K by lm-eval (EleutherAI's harness, in an environment of its own) against a running server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

SHOTS = 8
TASK = "gsm8k_file"
# The task of the harness itself, but from a file, with the same examples before every question.
YAML = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{train: {train}, test: {test}}}}}
output_type: generate_until
training_split: train
fewshot_split: train
test_split: test
num_fewshot: {shots}
fewshot_config: {{sampler: first_n}}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:"], do_sample: false, temperature: 0.0, max_gen_toks: {most}}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true,
     ignore_punctuation: false, regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]}}
filter_list:
  - name: flexible-extract
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
"""


@dataclass(frozen=True)
class HarnessResult:
    """The results of one run of the harness."""

    answers: list[str]
    num_right: int
    seconds: float  # of all requests, divided by those at once
    num_prompt: int
    num_cached: int


class Harness:
    """lm-eval with the problems of a file.

    Args:
        python: an interpreter that has lm-eval: `PYTHON -m pip install "lm_eval[api]"`.
        path: JSON lines, each {"question": ..., "answer": "... #### 18"}; the first 8 are examples.
    """

    def __init__(self, python: str, path: Path, count: int, max_tokens: int, threads: int) -> None:
        check = [python, "-c", "import lm_eval"]
        if subprocess.run(check, capture_output=True, check=False).returncode:  # noqa: S603
            sys.exit(
                f'{python} has no lm-eval: run {python} -m pip install "lm_eval[api]", or name an '
                "interpreter that has it with --lm-eval"
            )
        try:
            lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        except OSError as error:
            sys.exit(f"{path} cannot be read: {error}")
        if len(lines) <= SHOTS:
            sys.exit(f"{path} has {len(lines)} problems; more than {SHOTS} are needed")
        self.python, self.threads, self.count = python, threads, min(count, len(lines) - SHOTS)
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        for name, part in (("train", lines[:SHOTS]), ("test", lines[SHOTS:][:count])):
            (folder / f"{name}.jsonl").write_text("\n".join(part) + "\n", "utf-8")
        files = {name: json.dumps(str(folder / f"{name}.jsonl")) for name in ("train", "test")}
        task = YAML.format(task=TASK, shots=SHOTS, most=max_tokens, **files)
        (folder / f"{TASK}.yaml").write_text(task, "utf-8")
        self.rounds = 0

    def ask_all(self, url: str) -> HarnessResult:
        """Run lm-eval once on all problems; returns answers, score and the counters' growth."""
        self.rounds += 1
        out = Path(self.folder.name) / f"round-{self.rounds}"
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:  # noqa: S310
            model = json.load(answer)["data"][0]["id"]
        options = {
            "model": model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": self.threads,
            "max_retries": 1,
            "tokenized_requests": False,
            "tokenizer_backend": None,
        }
        command = [self.python, "-m", "lm_eval", "--model", "local-completions", "--tasks", TASK]
        command += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
        command += ["--include_path", self.folder.name, "--output_path", str(out), "--log_samples"]
        before = counters(url)
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            sys.exit(f"lm-eval failed:\n{done.stderr[-4000:]}")
        after = counters(url)
        spent = {name: after[name] - before.get(name, 0.0) for name in after}
        [results] = out.rglob("results_*.json")
        [samples] = out.rglob(f"samples_{TASK}_*.jsonl")
        records = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
        records.sort(key=lambda record: int(record["doc_id"]))
        score = json.loads(results.read_text("utf-8"))["results"][TASK]
        return HarnessResult(
            answers=[str(record["resps"][0][0]) for record in records],
            num_right=round(score["exact_match,flexible-extract"] * len(records)),
            seconds=spent["seconds"] / self.threads,
            num_prompt=int(spent["prompt"]),
            num_cached=int(spent["cached"]),
        )


def counters(url: str) -> dict[str, float]:
    """Read the server's counters: prompt tokens, cached tokens and seconds of latency."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()

    def total(name: str, labels: str = "") -> float:
        values = re.findall(rf"^{name}(?:\{{[^}}]*{labels}[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    source = "ramify_prompt_tokens_by_source_total"
    return {
        "prompt": total("ramify_prompt_tokens_total"),
        "cached": total(source, 'source="read"') + total(source, 'source="shared"'),
        "seconds": total("ramify_e2e_request_latency_seconds_sum"),
    }
