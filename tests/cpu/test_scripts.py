"""Scripts that convert and compare checkpoints, run as a user runs them."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ramify.testing import write_tiny_checkpoint

pytest.importorskip("transformers", reason="the scripts need the extra ramify[hf]")
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NUM_LAYERS, WIDTH, INNER, HEADS, KV_HEADS = 2, 32, 64, 4, 2
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]


def run_script(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPTS / name, *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def write_gguf(file: Path) -> dict[str, torch.Tensor]:
    """A tiny Llama in GGUF, one tensor of it in Q8_0; returns the tensors by GGUF's names."""
    gguf = pytest.importorskip("gguf", reason="it writes and reads GGUF files")
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(TOKENS) - len(kinds))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd": (len(TOKENS), WIDTH),
        "output_norm": (WIDTH,),
        "output": (len(TOKENS), WIDTH),
    }
    for layer in range(NUM_LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (WIDTH,),
            f"blk.{layer}.ffn_norm": (WIDTH,),
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (kv_width, WIDTH),
            f"blk.{layer}.attn_v": (kv_width, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (INNER, WIDTH),
            f"blk.{layer}.ffn_up": (INNER, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, INNER),
        }
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator) / 8
        if name == "blk.0.ffn_up":
            packed = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            tensor = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
        else:
            writer.add_tensor(f"{name}.weight", tensor.numpy())
        tensors[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_becomes_a_checkpoint_with_its_tensors(tmp_path: Path) -> None:
    """Dequantised bit for bit, under transformers' names, and Ramify loads the directory."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    tensors = write_gguf(tmp_path / "tiny.gguf")

    result = run_script("gguf_to_checkpoint.py", tmp_path / "tiny.gguf", tmp_path / "out")

    assert result.returncode == 0, result.stderr
    stored = load_file(tmp_path / "out" / "model.safetensors")
    names = {
        "attn_v": "self_attn.v_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_norm": "post_attention_layernorm",
    }
    for layer in range(NUM_LAYERS):
        for name, theirs in names.items():
            expected = tensors[f"blk.{layer}.{name}"]
            assert torch.equal(stored[f"model.layers.{layer}.{theirs}.weight"], expected)
    assert torch.equal(stored["model.embed_tokens.weight"], tensors["token_embd"])
    assert torch.equal(stored["lm_head.weight"], tensors["output"])
    # Q and K come in another order of rotary pairs.
    q = stored["model.layers.0.self_attn.q_proj.weight"]
    pairs = tensors["blk.0.attn_q"].view(HEADS, WIDTH // HEADS // 2, 2, WIDTH).transpose(1, 2)
    assert torch.equal(q, pairs.reshape(WIDTH, WIDTH))


def test_a_gguf_file_that_is_missing_is_one_line(tmp_path: Path) -> None:
    """The error names the path."""
    result = run_script("gguf_to_checkpoint.py", tmp_path / "no.gguf", tmp_path / "out")

    assert result.returncode == 1
    assert result.stderr.strip() == f"error: there is no file {tmp_path / 'no.gguf'}"


def compare(path: Path, monkeypatch: pytest.MonkeyPatch) -> str | int | None:
    """Run the comparison in this process; returns its exit code."""
    script = SCRIPTS / "compare_with_transformers.py"
    options = ["--prompts", "4", "--max-prompt", "100", "--max-tokens", "8"]
    monkeypatch.setattr(sys, "argv", [str(script), str(path), *options])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    return caught.value.code


def test_answers_are_compared_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 and a line for each prompt, cold and from the cache."""
    write_tiny_checkpoint(tmp_path, "llama")

    assert compare(tmp_path, monkeypatch) == 0

    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["0"] * 4
    assert last.endswith("0 wrong tokens or answers")


def test_answers_of_another_model_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 if the reference has other weights."""
    write_tiny_checkpoint(tmp_path, "llama")
    load = AutoModelForCausalLM.from_pretrained

    def load_damaged(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_damaged)

    assert compare(tmp_path, monkeypatch) == 1
    assert " 0 wrong" not in capsys.readouterr().out.splitlines()[-1]
