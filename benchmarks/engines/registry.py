"""Every engine of the benchmark tables, in table order."""

from __future__ import annotations

from engines.contract import Entry

OURS = "ramify"  # what all ratios refer to
REFERENCE = "transformers"  # whose tokens are compared with

ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(OURS, "**Ramify**", "ours"),
        Entry("ramify-off", "Ramify, cache off", "ours", options={"prefix_cache": False}),
        Entry("openvino", "OpenVINO GenAI", "openvino_genai", "openvino"),
        Entry("vllm", "vLLM, CPU build", "vllm_cpu", "vllm"),
        Entry("llama-server", "llama.cpp's server", "llama_server", "llama"),
        Entry(REFERENCE, "transformers, generate", "transformers_generate"),
    )
}
SPECULATION = {
    name: Entry(
        f"ramify-speculate-{name}", f"speculation: {name}", "ours", options={"speculative": name}
    )
    for name in ("off", "ngram", "tree")
}
WATCHED = Entry("ramify-watched", "Ramify, measured inside", "ours", options={"stopwatch": True})


def planted(factor: float) -> Entry:
    """Ramify with every step slowed down by `factor`, which is part of the entry's name."""
    return Entry(f"{OURS}*{factor}", "Ramify, slowed down", "ours", options={"plant": factor})


def find(name: str) -> Entry:
    """Return the entry called `name`; worker processes look theirs up by it."""
    if name.startswith(f"{OURS}*"):
        return planted(float(name.partition("*")[2]))
    return ALL[name]


ALL = {entry.name: entry for entry in (*ENTRIES.values(), *SPECULATION.values(), WATCHED)}
