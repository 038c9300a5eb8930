"""lm-eval: log-likelihoods over completions, generation over chat, local and remote tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from report import MODEL, SCRATCH, TOKENIZER, URL, case

folder = Path(SCRATCH) / "lm_eval"
folder.mkdir(parents=True, exist_ok=True)
rows = [{"question": f"Is {n} even?", "choices": ["yes", "no"], "answer": n % 2} for n in range(12)]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
COMMON = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
(folder / "choice.yaml").write_text(
    f"task: here_choice\noutput_type: multiple_choice{COMMON}doc_to_choice: choices\n"
    "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
)
(folder / "write.yaml").write_text(
    f'task: here_write\noutput_type: generate_until{COMMON}doc_to_target: "yes"\n'
    'generation_kwargs: {until: ["?"], max_gen_toks: 8, do_sample: false}\n'
    "metric_list: [{metric: exact_match}]\n"
)
MANAGER = TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(kind: str, task: str, path: str, *, chat: bool = False, **options: object) -> str:
    """Run a task; returns its results in a line."""
    arguments = {"model": MODEL, "base_url": f"{URL}{path}", "num_concurrent": 2, "max_retries": 1}
    results = lm_eval.simple_evaluate(
        kind, model_args=arguments | options, tasks=[task], task_manager=MANAGER,
        apply_chat_template=chat, bootstrap_iters=0,
    )  # fmt: skip
    values = results["results"][task]
    return ", ".join(f"{name}={value}" for name, value in values.items() if "," in name)


LOCAL = {"tokenizer": TOKENIZER, "tokenizer_backend": "huggingface"}


@case("completions: log-likelihoods")
def _() -> str:
    return evaluate("local-completions", "here_choice", "/v1/completions", **LOCAL)


@case("completions: generation")
def _() -> str:
    return evaluate("local-completions", "here_write", "/v1/completions", **LOCAL)


@case("chat completions: generation")
def _() -> str:
    return evaluate("local-chat-completions", "here_write", "/v1/chat/completions", chat=True)


@case("completions: remote tokenizer")
def _() -> str:
    return evaluate(
        "local-completions", "here_choice", "/v1/completions", tokenizer_backend="remote"
    )
