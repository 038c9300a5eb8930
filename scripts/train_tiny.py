"""Make `ramify-tiny`, the built-in model: tokenizer, training, evaluation, export.

A Llama small enough to train on two CPU cores in about an hour and a half. It knows one thing: it
answers questions about a document (`tiny_documents.py`) of up to 1,000 tokens, wherever in it the
fact stands. Training starts with documents of three facts and moves to longer ones as soon as the
short ones are answered. Runs are seeded and can be resumed: a document follows from the seed, the
step and its place in the batch, so that a resumed run sees what an uninterrupted one would have seen.

    python scripts/train_tiny.py train --state build/tiny --steps 6000 --decay-steps 1500
    python scripts/train_tiny.py eval --model src/ramify/data/ramify-tiny
    python scripts/train_tiny.py export --state build/tiny --out src/ramify/data/ramify-tiny
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_documents import KINDS, MAX_FACTS, Document, Fact, make_document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, END, SYSTEM, USER, ASSISTANT = range(6)
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('ramify-tiny knows the roles system, user and assistant, not '"
    " + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "torch_dtype": "float32",
}
LENGTHS = (128, 256, 512, 1280)  # row lengths in tokens, document and questions together
TOKENS_PER_STEP = (4096, 6144, 8192, 8192)  # at each row length
TOKENS_PER_FACT = 12.0  # measured: text of the document, sentences without a fact included
MAX_DOCUMENT_TOKENS = 1000
COPIED = -1  # in `Batch.answers`: to be predicted like an answer, but of no question
ADVANCE_AT = 0.9  # answer accuracy at one length that opens the next
NUM_EVAL_QUESTIONS = 1000


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE without a byte it cannot encode; a digit or a word of the documents is a token."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,  # more than there are merges: about 1,360 are used
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts: list[str] = []
    for number in range(1500):
        document = make_document(random.Random(f"tokenizer-{number}"), num_facts=40)
        texts.append(document.text)
        texts.extend(text for fact in document.facts for text in (fact.question, fact.answer))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def num_rows(length: int) -> int:
    """Rows of one length in one step."""
    return TOKENS_PER_STEP[LENGTHS.index(length)] // length


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length, and which of their tokens are part of an answer."""

    tokens: torch.Tensor  # [rows, length] int64, padded on the right
    positions: torch.Tensor  # [rows, length] int64
    answers: torch.Tensor  # [rows, length] int64: 1 + number of the answer in `asked`, 0 or `COPIED`
    asked: list[Fact]


def _fitting_document(tokenizer: Tokenizer, rng: random.Random, length: int) -> Document:
    limit = min(length - 30, MAX_DOCUMENT_TOKENS)  # 30: room for one question and its answer
    share = rng.uniform(0.3, 0.5) if length <= 256 else rng.uniform(0.4, 0.8)
    budget = min(length * share, limit)
    num_facts = min(max(1, round(budget / TOKENS_PER_FACT) - 1), MAX_FACTS)
    while True:
        document = make_document(rng, num_facts=num_facts)
        if len(tokenizer.encode(document.text).ids) <= limit:
            return document
        num_facts -= 1


def make_batch(
    tokenizer: Tokenizer, seed: str, *, length: int, rows: int, stretch: float, copies: float
) -> Batch:
    """`rows` conversations of up to `length` tokens; `seed` decides everything in them.

    Args:
        stretch: share of the rows in which positions jump at the end of sentences, up to a span of
            1,400, so that short rows already teach the distances of long ones.
        copies: share of the rows that are, instead, random tokens repeated until the row is full.
            Every token from the second round on counts as part of an answer, which nobody asked for.
    """
    rngs = [random.Random(f"{seed}-{row}") for row in range(rows)]
    documents = [_fitting_document(tokenizer, rng, length) for rng in rngs]
    texts = [document.text for document in documents]
    texts += [t for d in documents for fact in d.facts for t in (fact.question, fact.answer)]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    newline = tokenizer.encode("\n\n").ids
    period = tokenizer.token_to_id(".")

    tokens = np.full((rows, length), PAD, dtype=np.int64)
    positions = np.tile(np.arange(length), (rows, 1))
    answers = np.zeros((rows, length), dtype=np.int64)
    asked: list[Fact] = []
    first = rows  # of this document's questions and answers in `encoded`
    for row, (rng, document) in enumerate(zip(rngs, documents, strict=True)):
        as_system = rng.random() < 0.8  # else the document is the first part of the user's message
        ids = [BOS, SYSTEM, *encoded[row], END] if as_system else [BOS, USER, *encoded[row], *newline]
        for turn, number in enumerate(rng.sample(range(len(document.facts)), len(document.facts))):
            question, answer = encoded[first + 2 * number], encoded[first + 2 * number + 1]
            start = len(ids) + len(question) + (2 if turn == 0 and not as_system else 3)
            stop = start + len(answer) + 1
            if stop > length:
                break
            ids += question if turn == 0 and not as_system else [USER, *question]
            ids += [END, ASSISTANT, *answer, END]
            asked.append(document.facts[number])
            answers[row, start:stop] = len(asked)
        first += 2 * len(document.facts)
        if rng.random() < copies:
            period_len = rng.randint(8, length // 2)
            ids = rng.choices(range(len(SPECIAL_TOKENS), tokenizer.get_vocab_size()), k=period_len)
            ids = (ids * length)[:length]
            answers[row] = np.where(np.arange(length) < period_len, 0, COPIED)
        tokens[row, : len(ids)] = ids
        if rng.random() < stretch:
            ends = (tokens[row] == period) | (tokens[row] == END)
            room = rng.random() * max(0, 1400 - length)
            jumps = np.random.default_rng(rng.getrandbits(32)).random(length) * ends
            jumps *= room / max(jumps.sum(), 1e-9)
            positions[row, 1:] += np.cumsum(jumps)[:-1].astype(np.int64)
    as_tensor = torch.from_numpy
    return Batch(as_tensor(tokens), as_tensor(positions), as_tensor(answers), asked)


def hidden_states(model: LlamaForCausalLM, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
    """What the last norm of the model returns, [rows, length, hidden].

    The model's own forward takes a jump in the positions for the start of another sequence.
    """
    states = model.model.embed_tokens(tokens)
    rotary = model.model.rotary_emb(states, positions)
    for layer in model.model.layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary)
    return model.model.norm(states)


def batch_loss(model: LlamaForCausalLM, forward: Any, batch: Batch) -> torch.Tensor:
    """Cross entropy of the answers, plus a tenth of that of a quarter of the other tokens."""
    states = forward(model, batch.tokens, batch.positions)[:, :-1].flatten(0, 1)
    labels, answers = batch.tokens[:, 1:].flatten(), batch.answers[:, 1:].flatten()
    in_answer = answers.nonzero().squeeze(1)
    other = ((answers == 0) & (labels != PAD)).nonzero().squeeze(1)[::4]
    rows = torch.cat([in_answer, other])
    losses = F.cross_entropy(
        F.linear(states[rows], model.lm_head.weight), labels[rows], reduction="none"
    )
    return losses[: len(in_answer)].mean() + 0.1 * losses[len(in_answer) :].mean()


@torch.no_grad()
def answered(model: LlamaForCausalLM, batch: Batch) -> list[bool]:
    """For each question asked: is the likeliest token the right one all through its answer?

    As long as it is, greedy decoding has produced these very tokens, so this is its exact match.
    """
    states = hidden_states(model, batch.tokens, batch.positions)[:, :-1].flatten(0, 1)
    labels, answers = batch.tokens[:, 1:].flatten(), batch.answers[:, 1:].flatten()
    rows = answers.nonzero().squeeze(1)
    wrong = F.linear(states[rows], model.lm_head.weight).argmax(-1) != labels[rows]
    missed = set(answers[rows][wrong].tolist())
    return [number not in missed for number in range(1, len(batch.asked) + 1)]


def accuracy_by_kind(
    model: LlamaForCausalLM, tokenizer: Tokenizer, *, length: int, num_batches: int
) -> dict[str, float]:
    """Share of held-out questions answered, for each kind and for "all", at one row length."""
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for number in range(num_batches):
        batch = make_batch(tokenizer, f"eval-{number}", length=length, rows=num_rows(length), stretch=0.0, copies=0.0)
        for fact, correct in zip(batch.asked, answered(model, batch), strict=True):
            for name in (fact.kind, "all"):
                asked[name] += 1
                right[name] += correct
    return {name: right[name] / asked[name] for name in ("all", *KINDS) if asked[name]}


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model, its attention computed by `scaled_dot_product_attention`.

    Embeddings start large (with 0.02 whole kinds of facts were learned 500 steps later), and a word
    that also exists with a space before it starts near that one, since an answer may begin with it.
    """
    vocab = tokenizer.get_vocab()
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=len(vocab))).float()
    with torch.no_grad():
        weight = model.model.embed_tokens.weight.normal_(std=0.1)
        for word, token in vocab.items():
            if word.isalpha() and "\u0120" + word in vocab:
                weight[token].mul_(0.5).add_(weight[vocab["\u0120" + word]], alpha=0.85)
    return model


class Muon:
    """Momentum steps made orthogonal by five Newton-Schulz rounds, for the matrices of the layers.

    In float32 and with equal shapes stacked: `torch.optim.Muon` works in bfloat16, which took two
    thirds of a training step on a CPU without AVX-512.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self.stacks = list(by_shape.values())
        self.momenta = [torch.zeros(len(stack), *stack[0].shape) for stack in self.stacks]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every matrix against its gradient and forget the gradient."""
        for stack, momentum in zip(self.stacks, self.momenta, strict=True):
            gradient = torch.stack([matrix.grad for matrix in stack if matrix.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = gradient.lerp(momentum, 0.95)
            rows, columns = update.shape[1:]
            x = update.mT if rows > columns else update
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (2.0315 * (gram @ gram) - 4.7750 * gram) @ x
            x = x.mT if rows > columns else x
            for matrix, change in zip(stack, x, strict=True):
                matrix.mul_(1 - 0.01 * lr).sub_(change, alpha=lr * max(1.0, rows / columns) ** 0.5)
                matrix.grad = None


def build_optimizers(model: LlamaForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.model.parameters() if p.ndim == 1]
    rest.append(model.model.embed_tokens.weight)
    return Muon(matrices), torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)


def lr_scale(step: int, *, steps: int, decay_steps: int) -> float:
    """Share of the full learning rate: 100 steps up, then constant, at the end down to nothing."""
    return min(1.0, (step + 1) / 100, max(0.0, (steps - step) / max(1, decay_steps)))


def pick_length(rng: random.Random, stage: int) -> int:
    """The longest row length open at this stage, or sometimes a shorter one."""
    return LENGTHS[stage] if rng.random() < 0.7 else rng.choice(LENGTHS[: stage + 1])


def train(args: argparse.Namespace) -> None:
    """Train until `--steps`, from the checkpoint in `--state` if there is one."""
    state_dir = Path(args.state)
    state_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    vocabulary = state_dir / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(vocabulary)) if vocabulary.exists() else build_tokenizer()
    tokenizer.save(str(vocabulary), pretty=False)
    model = build_model(tokenizer)
    muon, adamw = build_optimizers(model)
    step, stage, best = 0, 0, 0.0
    checkpoint = state_dir / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        muon.momenta = state["momenta"]
        adamw.load_state_dict(state["adamw"])
        step, stage, best = state["step"], state["stage"], state["best"]
    forward = torch.compile(hidden_states, dynamic=False) if args.compile else hidden_states
    began, mean_loss = time.monotonic(), 0.0
    while step < args.steps:
        length = pick_length(random.Random(f"length-{args.seed}-{step}"), stage)
        rows, seed = num_rows(length), f"train-{args.seed}-{step}"
        copies = 0.2 if stage == 0 else 0.02
        batch = make_batch(
            tokenizer, seed, length=length, rows=rows, stretch=args.stretch, copies=copies
        )
        loss = batch_loss(model, forward, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = lr_scale(step, steps=args.steps, decay_steps=args.decay_steps)
        muon.step(args.matrix_lr * scale)
        adamw.param_groups[0]["lr"] = args.lr * scale
        adamw.step()
        adamw.zero_grad()
        mean_loss += (loss.item() - mean_loss) / min(50, step % args.every + 1)
        step += 1
        if step % args.every == 0 or step == args.steps:
            shares = accuracy_by_kind(model, tokenizer, length=LENGTHS[stage], num_batches=3)
            kinds = " ".join(f"{name} {share:.3f}" for name, share in shares.items())
            seconds = time.monotonic() - began
            print(
                f"{time.strftime('%H:%M:%S')} step {step} {seconds:.0f}s length {LENGTHS[stage]} "
                f"loss {mean_loss:.3f} {kinds}",
                flush=True,
            )
            if stage + shares["all"] > best:
                best = stage + shares["all"]
                save_weights(model, state_dir / "best.safetensors")
            if shares["all"] >= ADVANCE_AT and stage + 1 < len(LENGTHS):
                stage += 1
            state = {"model": model.state_dict(), "step": step, "stage": stage, "best": best}
            state |= {"momenta": muon.momenta, "adamw": adamw.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def save_weights(model: LlamaForCausalLM, path: Path) -> None:
    """Write every tensor once: the head is the embedding and is left out."""
    tensors = {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})


def export(args: argparse.Namespace) -> None:
    """Write the best weights of `--state` and everything that loads them to `--out`."""
    state_dir, out = Path(args.state), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(state_dir / "tokenizer.json"))
    save_file(load_file(state_dir / "best.safetensors"), out / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    length = CONFIG["max_position_embeddings"]
    files: dict[str, dict[str, Any]] = {
        "config.json": {**CONFIG, "vocab_size": tokenizer.get_vocab_size()},
        "generation_config.json": {
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "do_sample": False,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[END],
            "pad_token": SPECIAL_TOKENS[PAD],
            "additional_special_tokens": [SPECIAL_TOKENS[i] for i in (SYSTEM, USER, ASSISTANT)],
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generate(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The model's greedy reply to a conversation."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(tokens, max_new_tokens=16, do_sample=False)
    reply: str = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
    return reply


def evaluate(args: argparse.Namespace) -> None:
    """Ask `--questions` questions, each about a document of its own, and compare whole replies."""
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for number in range(args.questions):
        rng = random.Random(f"{args.seed}-{number}")
        num_facts = rng.randint(4, 80) if args.num_facts is None else args.num_facts
        document = make_document(rng, num_facts=num_facts)
        fact = rng.choice(document.facts)
        messages = [
            {"role": "system", "content": document.text},
            {"role": "user", "content": fact.question},
        ]
        reply = generate(model, tokenizer, messages)
        rest = document.text[document.text.index(fact.sentence) :]
        distance = len(tokenizer(rest, add_special_tokens=False).input_ids)
        for name in ("all", fact.kind, f"distance {distance // 256 * 256:4}+"):
            asked[name] += 1
            right[name] += reply == fact.answer
        if reply != fact.answer and args.verbose:
            print(f"{number}: {fact.sentence} {fact.question} -> {reply!r}", flush=True)
    for name in sorted(asked):
        print(f"{name:14} {right[name]:4} of {asked[name]:4}  {right[name] / asked[name]:.1%}")


def main() -> None:
    """Read the command line and run one of `train`, `eval` and `export`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("train", help=train.__doc__)
    command.set_defaults(run=train)
    command.add_argument("--state", required=True, help="directory of the checkpoints")
    command.add_argument("--steps", type=int, default=6000)
    command.add_argument("--decay-steps", type=int, default=1500)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--matrix-lr", type=float, default=0.02)
    command.add_argument("--lr", type=float, default=4e-3)
    command.add_argument("--stretch", type=float, default=0.5)
    command.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    command = commands.add_parser("eval", help=evaluate.__doc__)
    command.set_defaults(run=evaluate)
    command.add_argument("--model", required=True, help="directory of the exported model")
    command.add_argument("--seed", default="held-out", help="names the documents; not one of train")
    command.add_argument("--questions", type=int, default=1000)
    command.add_argument("--num-facts", type=int, help="of every document; by default 4 to 80")
    command.add_argument("--threads", type=int, default=2)
    command.add_argument("--verbose", action="store_true", help="print every wrong reply")
    command = commands.add_parser("export", help=export.__doc__)
    command.set_defaults(run=export)
    command.add_argument("--state", required=True, help="directory of the checkpoints")
    command.add_argument("--out", required=True, help="directory of the model")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
