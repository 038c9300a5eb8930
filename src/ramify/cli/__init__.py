"""The command line: demo, generate, info."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.serve import chat, keys, serve
from ramify.config import (
    AttentionSection,
    CacheSection,
    ModelSection,
    SchedulerSection,
)
from ramify.errors import ConfigError, RamifyError

if TYPE_CHECKING:
    from ramify.cli.demo import DemoResult
    from ramify.engine.llm import LLM
    from ramify.params import RequestOutput

app = typer.Typer(
    help="LLM inference that never computes the same prefix twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command()(serve)
app.command()(chat)
app.command()(keys)


class Dtype(str, Enum):
    """Precision of weights, K/V and arithmetic."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class KvDtype(str, Enum):
    """Precision of K/V alone."""

    auto = "auto"
    int8 = "int8"
    fp8 = "fp8"


class Speculative(str, Enum):
    """Where guesses for the next tokens come from."""

    off = "off"
    ngram = "ngram"
    tree = "tree"
    auto = "auto"


_MODEL, _CACHE = ModelSection(), CacheSection()
_SCHEDULER, _ATTENTION = SchedulerSection(), AttentionSection()

Model = Annotated[
    str, typer.Argument(help="Checkpoint directory, cached hub id, or ramify-tiny (built in).")
]
ModelOption = Annotated[
    str, typer.Option("--model", help="Checkpoint directory, cached hub id, or ramify-tiny.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="auto is the checkpoint's own.")]
KvDtypeOption = Annotated[KvDtype, typer.Option(help="auto is the model's; int8, fp8 round.")]
PageSize = Annotated[int, typer.Option(help="Tokens per page, the unit of sharing.")]
KvTokens = Annotated[int | None, typer.Option(help="Size of the K/V pool in tokens.")]
KvMemory = Annotated[int | None, typer.Option(help="Size of the K/V pool in bytes.")]
MaxSeqs = Annotated[int, typer.Option(help="Requests that run at once.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens per step: the chunk of a prefill.")]
MaxLen = Annotated[int | None, typer.Option(help="Tokens of the longest request.")]
Backend = Annotated[str, typer.Option(help="auto, or a name that `ramify info` lists.")]
Exact = Annotated[bool, typer.Option(help="Same bits whatever was cached.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def main() -> None:
    """Entry point of the `ramify` command."""
    app()


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """What we raise on purpose ends the command with one line and exit code 2."""
    try:
        yield
    except RamifyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def demo(
    model: ModelOption = _MODEL.model,
    document: Annotated[
        Path | None, typer.Option(help="A text to ask about, or JSON like the built-in quiz.")
    ] = None,
    num_questions: Annotated[int, typer.Option(min=1, help="For a text of your own.")] = 32,
    dtype: DtypeOption = Dtype.auto,
    page_size: PageSize = _CACHE.page_size,
    max_batch_tokens: MaxTokens = _SCHEDULER.max_batch_tokens,
    attention_backend: Backend = _ATTENTION.attention_backend,
    exact: Exact = _ATTENTION.exact,
    as_json: AsJson = False,
) -> None:
    """Ask 32 questions about one document: cache off, cold, warm.

    Exit code 0 means that all three rounds gave the same answers, 1 that they did not.
    """
    with _exit_on_error():
        from ramify.cli.demo import builtin_quiz, load_quiz, run_demo

        quiz = builtin_quiz() if document is None else load_quiz(document, num_questions)
        options = {
            "dtype": dtype.value,
            "page_size": page_size,
            "max_batch_tokens": max_batch_tokens,
            "attention_backend": attention_backend,
            "exact": exact,
        }
        with _progress(3 * len(quiz.questions)) as advance:
            result = run_demo(model, quiz, options, advance)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    else:
        _print_demo(result)
    raise typer.Exit(0 if result.same_answers else 1)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr; plain lines, one per round, where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        seen: set[str] = set()

        def tell(name: str) -> None:
            if name not in seen:
                seen.add(name)
                typer.echo(f"asking: {name}", err=True)

        yield tell
        return
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def _print_demo(result: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from ramify.cli.demo import KINDS

    console = Console()
    answers = Table(box=None, title="Answers", title_justify="left")
    for heading in ("", "question", "answer", "expected"):
        answers.add_column(heading)
    outputs = result.rounds[-1].outputs
    for question, answer, output in zip(
        result.quiz.questions, result.quiz.answers, outputs, strict=True
    ):
        said = output.text.strip()
        mark = " " if answer is None else "✓" if said == answer else "✗"
        answers.add_row(mark, question, said, "" if answer in (None, said) else answer)
    console.print(answers, markup=False)
    rounds = Table(box=None, title="\nPrompt tokens and time", title_justify="left")
    rounds.add_column("round")
    for heading in (*KINDS, "TTFT (median)", "all answers"):
        rounds.add_column(heading, justify="right")
    for one in result.rounds:
        counts = [f"{one.tokens(kind):,}" for kind in KINDS]
        rounds.add_row(one.name, *counts, _ms(one.ttft_s), _ms(one.total_s))
    console.print(rounds)
    num = len(result.quiz.questions)
    if result.num_known:
        console.print(f"\n{result.num_right} of {result.num_known} answers are right.")
    same = "the same tokens" if result.same_answers else "NOT the same tokens"
    console.print(f"All three rounds gave {same} for all {num} questions.")
    console.print(
        f"Warm, the first token comes {result.speed_up:.1f}x sooner than without a cache."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


@app.command()
def generate(
    model: Model = _MODEL.model,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; give it again for more of them.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File with one prompt; - is standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send prompts as user messages, by chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message, or @FILE; implies --chat.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest with this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same draws.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after it.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Likeliest tokens to report.")] = None,
    dtype: DtypeOption = Dtype.auto,
    page_size: PageSize = _CACHE.page_size,
    kv_cache_tokens: KvTokens = None,
    kv_cache_memory: KvMemory = None,
    max_num_seqs: MaxSeqs = _SCHEDULER.max_num_seqs,
    max_batch_tokens: MaxTokens = _SCHEDULER.max_batch_tokens,
    max_model_len: MaxLen = None,
    prefix_cache: Annotated[bool, typer.Option(help="Share prefixes.")] = True,
    speculative: Annotated[
        Speculative, typer.Option(help="Guess tokens; auto: from the tree, then from the text.")
    ] = Speculative.off,
    attention_backend: Backend = _ATTENTION.attention_backend,
    exact: Exact = _ATTENTION.exact,
    progress: Annotated[
        bool | None, typer.Option(help="A bar on stderr; unset: for two prompts, on a terminal.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Continue prompts with any supported checkpoint; shared prefixes are computed once."""
    with _exit_on_error():
        texts = [*(prompt or ()), *(_read(path) for path in prompt_file or ())]
        if not texts:
            raise ConfigError("no prompt given; use --prompt TEXT or --prompt-file FILE")
        from ramify.engine.llm import LLM
        from ramify.params import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        llm = LLM(
            model,
            progress=True,
            dtype=dtype.value,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            prefix_cache=prefix_cache,
            speculative=speculative.value,
            attention_backend=attention_backend,
            exact=exact,
        )
        if chat or system is not None:
            talks = [_messages(system, text) for text in texts]
            outputs = llm.chat(talks, params, progress=progress)
        else:
            outputs = llm.generate(texts, params, progress=progress)
    failed = [one for one in outputs if one.error is not None]
    if as_json:
        told = [_output_json(one) for one in outputs]
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        for one in outputs:
            typer.echo(one.text if one.error is None else "")
            typer.echo(_summary(one), err=True)
    raise typer.Exit(2 if failed else 0)


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    talk = [{"role": "user", "content": text}]
    if system is None:
        return talk
    content = _read(Path(system[1:])) if system.startswith("@") else system
    return [{"role": "system", "content": content}, *talk]


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _summary(output: RequestOutput) -> str:
    if output.error is not None:
        return f"error: {output.error}"
    cache, metrics = output.cache, output.metrics
    speed = metrics.decode_tokens_per_s
    return (
        f"[{output.finish_reason.value}] prompt {cache.prompt_tokens} tokens: "
        f"{cache.read_tokens} read, {cache.shared_tokens} shared, {cache.computed_tokens} computed; "
        f"output {len(output.token_ids)} tokens; first after {_ms(metrics.ttft_s or 0.0)}"
        + (f", then {speed:.1f} tokens/s" if speed else "")
    )


def _output_json(output: RequestOutput) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "prompt_tokens": len(output.prompt_token_ids),
        "cache": asdict(output.cache),
        "metrics": asdict(output.metrics),
        "logprobs": None if output.logprobs is None else [asdict(one) for one in output.logprobs],
        "error": None if output.error is None else str(output.error),
    }


@app.command()
def info(
    model: Model = _MODEL.model,
    dtype: DtypeOption = Dtype.auto,
    page_size: PageSize = _CACHE.page_size,
    kv_cache_tokens: KvTokens = None,
    kv_cache_memory: KvMemory = None,
    max_num_seqs: MaxSeqs = _SCHEDULER.max_num_seqs,
    max_model_len: MaxLen = None,
    attention_backend: Backend = _ATTENTION.attention_backend,
    exact: Exact = _ATTENTION.exact,
    as_json: AsJson = False,
) -> None:
    """Versions, device, backend and why, exactness probe, memory plan."""
    with _exit_on_error():
        from ramify.engine.llm import LLM

        llm = LLM(
            model,
            progress=True,
            dtype=dtype.value,
            page_size=page_size,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
            exact=exact,
        )
        facts = _collect_info(llm)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    for section, entries in facts.items():
        typer.echo(f"{section}:")
        for name, value in entries.items():
            typer.echo(f"  {name + ':':24} {value}")


@app.command()
def verify(
    model: Model = _MODEL.model,
    sample: Annotated[int, typer.Option(min=1, help="Made-up prompts to compute.")] = 8,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on each line.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode for each.")] = 8,
    dtype: DtypeOption = Dtype.auto,
    kv_dtype: KvDtypeOption = KvDtype.auto,
    page_size: PageSize = _CACHE.page_size,
    attention_backend: Backend = _ATTENTION.attention_backend,
    exact: Exact = _ATTENTION.exact,
    as_json: AsJson = False,
) -> None:
    """Compute prompts cold, warm, chunked, batched and preempted, and compare every bit.

    Exit code 0 means that nothing differs, 1 that something does.
    """
    with _exit_on_error():
        from ramify.engine.exactness_check import ExactnessCheck, random_prompts, read_prompt_lines
        from ramify.engine.llm import LLM

        llm = LLM(
            model,
            progress=True,
            dtype=dtype.value,
            kv_dtype=kv_dtype.value,
            page_size=page_size,
            attention_backend=attention_backend,
            exact=exact,
        )
        vocab_size, limit = llm.engine.model_config.vocab_size, llm.config.max_model_len
        asked = (
            random_prompts(sample, vocab_size, limit)
            if prompts is None
            else read_prompt_lines(llm, prompts)
        )
        if not as_json:
            typer.echo(
                f"{'way':24}{'answers':>9}{'logits':>9}{'K/V':>9}{'shared':>9}{'preempted':>11}  bits"
            )
        ways = []
        for way in ExactnessCheck(llm, asked, new_tokens).scenarios():
            ways.append(way)
            if not as_json:
                found = f"{len(way.differences)} differ" if way.differences else "the same"
                typer.echo(
                    f"{way.name:24}{way.num_answers:9}{way.num_logits:9}{way.num_kv:9}"
                    f"{way.read_tokens:9}{way.preemptions:11}  {found}"
                )
    different = [one for way in ways for one in way.differences]
    if as_json:
        typer.echo(json.dumps([asdict(way) for way in ways], indent=2))
    elif different:
        typer.echo(f"first difference: {different[0]}")
    raise typer.Exit(1 if different else 0)


def _collect_info(llm: LLM) -> dict[str, dict[str, Any]]:
    import platform

    import torch

    import ramify
    from ramify.attention.backend import BACKENDS
    from ramify.engine.execution.host_memory import free_memory

    config, plan = llm.engine.model_config, llm.config
    weights = llm.engine.num_weight_bytes
    chosen = llm.engine.backend_choice
    backends = {
        name: f"chosen: {chosen.reason}"
        if name == chosen.name
        else f"not used: {chosen.rejected[name]}"
        for name in BACKENDS
    }
    return {
        "versions": {
            "ramify": ramify.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "device": {
            "kind": "cpu",
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "model": {
            "path": str(llm.engine.path),
            "architecture": config.architecture,
            "dtype": str(llm.engine.decoder.dtype).removeprefix("torch."),
            "layers": config.num_layers,
            "context": f"{plan.max_model_len} tokens",
        },
        "attention backends": backends,
        "exactness": {
            "exact": plan.requested.attention.exact,
            **{
                f"{one.operation} {'x'.join(map(str, one.shape))}": f"{one.strategy} ({one.reason})"
                for one in llm.engine.exactness()
            },
        },
        "memory": {
            "weights": _mib(weights),
            "K/V per token": f"{plan.token_bytes:,} bytes",
            "K/V pages": f"{plan.num_pages:,} of {plan.page_size} tokens",
            "K/V pool": f"{plan.kv_cache_tokens:,} tokens, {_mib(plan.kv_cache_bytes)}",
            "free": _mib(free_memory()),
        },
    }


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


if __name__ == "__main__":
    main()
