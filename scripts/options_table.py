"""Write docs/options.md: every option of `LLM` and `ramify serve`, its default and what it is for.

    python scripts/options_table.py [FILE]

The options of the engine come from the sections of `ramify.config.EngineConfig`, whose fields carry
their help as `field(default=..., metadata={"help": ...})`; the flags come from the command itself.
`make options` runs this; tests/pure/test_options_table.py fails when the file is not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

from ramify.cli import app
from ramify.config import EngineConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
INTRO = """\
# Options

<!-- Written by scripts/options_table.py (make options). Edit the help in src/ramify/config.py instead. -->

Engine options are keyword arguments of `LLM` and `AsyncLLM`, and flags of `ramify serve`, `chat` and
`generate`. An unknown option is an error that lists the known ones. For an option of vLLM, SGLang, transformers or
llama.cpp, the error says what to use instead.

```python
llm = LLM("path/to/checkpoint", kv_cache_tokens=65_536, policy="lru")
```

```sh
ramify serve path/to/checkpoint --kv-cache-tokens 65536 --policy lru
```

`--config FILE` reads the flags of these commands from a TOML file, at the top level or below the name of a section. A
flag on the command line overrides the file.

```toml
port = 8001
max_waiting = 256

[cache]
kv_cache_tokens = 65536
policy = "lru"
```

`OMP_NUM_THREADS` sets the number of threads; without it, PyTorch's default holds.

CPU kernels come from the first of these sources that has them:

1. Object code in the wheel, for x86-64 with AVX2, AVX-512, or AVX-512 and bfloat16 dot products. It needs the
   versions of Numba, llvmlite and LLVM, the Python and the operating system that it was built with; with
   others, a line of the log says so. `pip install -c constraints.txt` takes those versions. `NUMBA_CPU_NAME` and
   `NUMBA_CPU_FEATURES` turn it off.
2. Numba's cache on disk (`NUMBA_CACHE_DIR`).
3. The compiler: half a minute of processor time for the first dtype, less for each further one. The logger `ramify`
   warns on stderr: "compiling CPU kernels, once for this machine: 1 of 3". Processes that
   need the same kernel wait for the first, at most ten minutes. If the cache is not writable, every process compiles anew.

## Names in other engines

| here | vLLM | SGLang | llama.cpp's server |
|---|---|---|---|
| `page_size` | `--block-size` | `--page-size` | |
| `kv_cache_tokens` | | `--max-total-tokens` | `--ctx-size` |
| `kv_cache_memory` | `--kv-cache-memory-bytes` | | |
| `kv_dtype` | `--kv-cache-dtype` | `--kv-cache-dtype` | `--cache-type-k`, `--cache-type-v` |
| `prefix_cache` | `--enable-prefix-caching` | `--disable-radix-cache` | `--cache-prompt` |
| `policy` | | `--radix-eviction-policy` | |
| `max_num_seqs` | `--max-num-seqs` | `--max-running-requests` | `--parallel` |
| `max_batch_tokens` | `--max-num-batched-tokens` | `--chunked-prefill-size` | `--batch-size` |
| `max_waiting` | | `--max-queued-requests` | |
| `max_model_len` | `--max-model-len` | `--context-length` | `--ctx-size` |
| `attention_backend` | `--attention-backend` | `--attention-backend` | |
| `exact` | `VLLM_BATCH_INVARIANT=1` | `--enable-deterministic-inference` | |
"""


def engine_sections() -> Iterator[tuple[str, Any]]:
    """(title, section dataclass) of each part of the configuration, in order."""
    for section in fields(EngineConfig):
        title = section.name.replace("_", " ").capitalize()
        yield title, section.default_factory


def serve_parameters() -> dict[str, Any]:
    """Parameters of `ramify serve` by name, as the command line knows them."""
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands["serve"].params}


def flag_of(parameter: Any) -> str:
    """`--exact`, `--no-exact`; an argument is written in capitals."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    flags = ", ".join(f"`{flag}`" for flag in (*parameter.opts, *parameter.secondary_opts))
    return flags + (f" (`${parameter.envvar}`)" if parameter.envvar else "")


def cell(value: object) -> str:
    """A default as code; nothing where an option may be left out and has none."""
    value = getattr(value, "value", value)
    return "" if value is None else f"`{value}`"


def escaped(text: str) -> str:
    """One line of text that may stand in a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def rows_of(section: Any, flags: dict[str, Any]) -> Iterator[str]:
    """A row for each field of a section.

    Raises:
        KeyError: a field has no metadata["help"].
    """
    for option in fields(section):
        parameter = flags.get(option.name)
        default = f"`{option.default}`"
        flag = "" if parameter is None else flag_of(parameter)
        if parameter is not None and parameter.default != option.default:
            default += f", `serve`: {cell(parameter.default)}"
        text = escaped(option.metadata["help"])
        yield f"| `{option.name}` | {flag} | {default} | {text} |"


def page() -> str:
    """The text of docs/options.md."""
    flags = serve_parameters()
    lines = [INTRO]
    for title, section in engine_sections():
        lines += [f"## {title}", "", "| `LLM` | `ramify serve` | default | what for |"]
        lines += ["|---|---|---|---|", *rows_of(section, flags), ""]
    engine = {option.name for _, section in engine_sections() for option in fields(section)}
    lines += ["## Server only", "", "| `ramify serve` | default | what for |", "|---|---|---|"]
    for name, parameter in flags.items():
        if name not in engine and name != "help":
            help_text = escaped(parameter.help or "")
            lines.append(f"| {flag_of(parameter)} | {cell(parameter.default)} | {help_text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
