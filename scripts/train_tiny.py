"""Make `ramify-tiny`, the built-in model: tokenizer, training, evaluation, export, demo document.

A Llama of 0.76 M parameters; it trains on two busy CPU cores in half an hour. It knows one thing:
it answers questions about a document (`tiny_documents.py`) of up to 1,000 tokens, wherever in it
the fact stands. Training starts with short documents and moves on when they are answered. Runs are
seeded and can be resumed: a batch follows from the seed and the step alone. config.json,
tokenizer_config.json (with the chat template) and generation_config.json are written by hand.

    python scripts/train_tiny.py train --state build/tiny --compile
    python scripts/train_tiny.py export --state build/tiny
    python scripts/train_tiny.py eval
    python scripts/train_tiny.py demo
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_documents import FACTS_PER_KIND, KINDS, Document, Fact, make_document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, BOS, END, SYSTEM, USER, ASSISTANT = range(6)
DATA_DIR = Path(__file__).parents[1] / "src" / "ramify" / "data"
MODEL_DIR = DATA_DIR / "ramify-tiny"
LENGTHS = (128, 128, 384, 1280)  # row lengths of the stages: document and questions together
ADVANCE_AT = (0.5, 0.85, 0.85)  # answer accuracy that opens the next stage
TOKENS_PER_STEP = 8192
TOKENS_PER_FACT = 12.0  # measured: text of the document, sentences without a fact included
MAX_DOCUMENT_TOKENS = 1000
COPIED = -1  # in `Batch.answers`: to be predicted like an answer, but of no question


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE: encodes any text; every digit and every word of the documents is one token."""
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Token rows of equal length, and the answer that each token belongs to."""

    tokens: torch.Tensor  # [rows, length] int64, padded on the right
    positions: torch.Tensor  # [rows, length] int64
    answers: torch.Tensor  # [rows, length] int64: 1 + index in `asked_facts`; else 0 or `COPIED`
    asked_facts: list[Fact]


def _fitting_document(tokenizer: Tokenizer, rng: random.Random, length: int) -> Document:
    limit = min(length - 30, MAX_DOCUMENT_TOKENS)  # 30: room for one question and its answer
    share = rng.uniform(0.3, 0.55) if length < MAX_DOCUMENT_TOKENS else rng.uniform(0.4, 0.8)
    num_facts = max(1, round(min(length * share, limit) / TOKENS_PER_FACT) - 1)
    # Few kinds, often: else short documents are answered by the kind of the question alone, and a
    # model that has learned that does not learn to look for the key (measured: 300 steps in vain).
    num_kinds = max(rng.choice((1, 1, 2, len(KINDS))), -(-num_facts // FACTS_PER_KIND))
    while True:
        document = make_document(rng, num_facts=num_facts, num_kinds=num_kinds)
        if len(tokenizer.encode(document.text).ids) <= limit:
            return document
        num_facts -= 1


def make_batch(
    tokenizer: Tokenizer, seed: str, *, length: int, stretch: float = 0.0, copies: float = 0.0
) -> Batch:
    """Conversations of up to `length` tokens each; `seed` decides everything in them.

    Args:
        stretch: share of the rows in which positions jump at the end of sentences, up to a span of
            1,400, so that short rows already teach the distances of long ones.
        copies: share of the rows that are, instead, random tokens repeated until the row is full.
            Their tokens from the second round on are to be predicted, too.
    """
    rows = TOKENS_PER_STEP // length
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
    facts: list[Fact] = []
    first = rows  # of this document's questions and answers in `encoded`
    for row, (rng, document) in enumerate(zip(rngs, documents, strict=True)):
        as_system = rng.random() < 0.8  # else the document is the first part of the user's message
        ids = [BOS, SYSTEM if as_system else USER, *encoded[row]]
        ids += [END] if as_system else newline
        for turn, number in enumerate(rng.sample(range(len(document.facts)), len(document.facts))):
            question, answer = encoded[first + 2 * number], encoded[first + 2 * number + 1]
            start = len(ids) + len(question) + (2 if turn == 0 and not as_system else 3)
            stop = start + len(answer) + 1
            if stop > length:
                break
            ids += question if turn == 0 and not as_system else [USER, *question]
            ids += [END, ASSISTANT, *answer, END]
            facts.append(document.facts[number])
            answers[row, start:stop] = len(facts)
        first += 2 * len(document.facts)
        if rng.random() < copies:
            period_len = rng.randint(4, length // 4)
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
    return Batch(as_tensor(tokens), as_tensor(positions), as_tensor(answers), facts)


def hidden_states(model: LlamaForCausalLM, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
    """What the last norm of the model returns, [rows, length, hidden].

    The model's own forward treats a jump in the positions as the start of another sequence.
    """
    states = model.model.embed_tokens(tokens)
    rotary = model.model.rotary_emb(states, positions)
    for layer in model.model.layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary)
    return model.model.norm(states)


def batch_loss(model: LlamaForCausalLM, forward: Any, batch: Batch) -> torch.Tensor:
    """Cross entropy of the answers, plus less for copied tokens and a quarter of the others."""
    states = forward(model, batch.tokens, batch.positions)[:, :-1].flatten(0, 1)
    labels, answers = batch.tokens[:, 1:].flatten(), batch.answers[:, 1:].flatten()
    in_answer = (answers > 0).nonzero().squeeze(1)
    copied = (answers == COPIED).nonzero().squeeze(1)
    other = ((answers == 0) & (labels != PAD)).nonzero().squeeze(1)[::4]
    rows = torch.cat([in_answer, copied, other])
    losses = F.cross_entropy(
        F.linear(states[rows], model.lm_head.weight), labels[rows], reduction="none"
    )
    parts = torch.split(losses, [len(in_answer), len(copied), len(other)])
    shares = zip((1.0, 0.3, 0.1), parts, strict=True)
    return torch.stack([share * part.mean() for share, part in shares if len(part)]).sum()


@torch.no_grad()
def accuracy_by_kind(
    model: LlamaForCausalLM, tokenizer: Tokenizer, *, length: int
) -> dict[str, float]:
    """Share of held-out questions answered, for "all" and for each kind, at one row length.

    A question counts if the likeliest token is the right one all through its answer and the end
    token. As long as it is, greedy decoding has produced these very tokens: this is exact match.
    """
    right: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for number in range(3):
        batch = make_batch(tokenizer, f"eval-{number}", length=length)
        states = hidden_states(model, batch.tokens, batch.positions)[:, :-1].flatten(0, 1)
        labels, answers = batch.tokens[:, 1:].flatten(), batch.answers[:, 1:].flatten()
        rows = answers.nonzero().squeeze(1)
        wrong = F.linear(states[rows], model.lm_head.weight).argmax(-1) != labels[rows]
        missed = set(answers[rows][wrong].tolist())
        for index, fact in enumerate(batch.asked_facts, 1):
            for name in (fact.kind, "all"):
                totals[name] += 1
                right[name] += index not in missed
    return {name: right[name] / totals[name] for name in ("all", *KINDS) if totals[name]}


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model, its attention computed by `scaled_dot_product_attention`.

    The parts of a look-up are there from the start; 600 steps from random weights did not find them.
    All embeddings share one direction, through which the heads of the first layer see how far away
    a token is, and nothing else: they begin as averages of the last few tokens, so that a value
    knows the key before it and an answer the key in its question. In the other layers half of the
    heads begin as "attend to what resembles me": one projection, on the slow half of the rotary
    frequencies, for queries and keys. What those layers read they write back as it was.
    """
    config: Any = LlamaConfig.from_pretrained(MODEL_DIR)
    assert config.vocab_size == tokenizer.get_vocab_size()
    model = LlamaForCausalLM(config)
    head_dim, num_heads = config.head_dim, config.num_attention_heads
    heads_per_kv = num_heads // config.num_key_value_heads
    slow = torch.arange(head_dim) % (head_dim // 2) >= head_dim // 4
    with torch.no_grad():
        shared = F.normalize(torch.randn(config.hidden_size), dim=0)
        embedding = model.model.embed_tokens.weight.normal_(std=0.1)
        embedding.add_((1.1 - embedding @ shared)[:, None] * shared)
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            keys = attention.k_proj.weight.view(-1, head_dim, config.hidden_size)
            queries = attention.q_proj.weight.view(num_heads, head_dim, config.hidden_size)
            values = attention.v_proj.weight.normal_(std=0.09)
            values.sub_((values @ shared)[:, None] * shared)
            if number == 0:
                attention.o_proj.weight.normal_(std=0.13)
                for group, pairs in enumerate(([3, 4, 5], [2, 3, 4])):  # windows of 10 and 5 tokens
                    distance = torch.zeros(head_dim)
                    distance[pairs] = 0.6
                    keys[group] = distance[:, None] * shared
                matching_heads = range(num_heads)
            else:
                keys[0].normal_(std=0.15).mul_(slow[:, None])
                keys[0].sub_((keys[0] @ shared)[:, None] * shared)
                attention.o_proj.weight.copy_(
                    0.1 * values.view_as(keys).repeat_interleave(heads_per_kv, 0).flatten(0, 1).T
                )
                matching_heads = range(heads_per_kv)
            for head in matching_heads:
                queries[head] = keys[head // heads_per_kv]
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


def pick_length(rng: random.Random, stage: int) -> int:
    """The longest row length open at this stage, or sometimes a shorter one."""
    return LENGTHS[stage] if rng.random() < 0.7 else rng.choice(LENGTHS[min(1, stage) : stage + 1])


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
    muon = Muon([p for p in model.model.layers.parameters() if p.ndim == 2])
    rest = [p for p in model.model.parameters() if p.ndim == 1] + [model.lm_head.weight]
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)
    step, stage, best = 0, 0, 0.0
    checkpoint = state_dir / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        muon.momenta = state["momenta"]
        adamw.load_state_dict(state["adamw"])
        step, stage, best = state["step"], state["stage"], state["best"]
    forward = torch.compile(hidden_states, dynamic=False) if args.compile else hidden_states
    began = time.monotonic()
    while step < args.steps:
        length = pick_length(random.Random(f"length-{args.seed}-{step}"), stage)
        seed = f"train-{args.seed}-{step}"
        copies = 0.1 if stage == 0 else 0.0  # they teach copying, then only slow the rest
        batch = make_batch(tokenizer, seed, length=length, stretch=0.5, copies=copies)
        loss = batch_loss(model, forward, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 100, (args.steps - step) / args.decay_steps)
        muon.step(0.007 * scale)
        adamw.param_groups[0]["lr"] = 1.5e-3 * scale
        adamw.step()
        adamw.zero_grad()
        step += 1
        if step % args.every == 0 or step == args.steps:
            shares = accuracy_by_kind(model, tokenizer, length=LENGTHS[stage])
            kinds = " ".join(f"{name} {share:.3f}" for name, share in shares.items())
            seconds = round(time.monotonic() - began)
            print(
                f"step {step} {seconds}s length {LENGTHS[stage]} loss {loss:.3f} {kinds}",
                flush=True,
            )
            if stage + shares["all"] > best:
                best = stage + shares["all"]
                weights = {f"model.{name}": t for name, t in model.model.state_dict().items()}
                save_file(weights, state_dir / "model.safetensors", {"format": "pt"})
            if stage < len(ADVANCE_AT) and shares["all"] >= ADVANCE_AT[stage]:
                stage += 1
            state = {"model": model.state_dict(), "step": step, "stage": stage, "best": best}
            state |= {"momenta": muon.momenta, "adamw": adamw.state_dict()}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)


def export(args: argparse.Namespace) -> None:
    """Copy the best weights of `--state` and the tokenizer into the model's directory."""
    for name in ("model.safetensors", "tokenizer.json"):
        (MODEL_DIR / name).write_bytes((Path(args.state) / name).read_bytes())


def load_exported(num_threads: int) -> tuple[Any, Any]:
    """The exported model and its tokenizer, as any user of transformers gets them."""
    torch.set_num_threads(num_threads)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODEL_DIR)


def generate(model: Any, tokenizer: Any, document: str, question: str) -> str:
    """The model's greedy reply to one question about one document."""
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(tokens, max_new_tokens=16, do_sample=False)
    reply: str = tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
    return reply


def demo(args: argparse.Namespace) -> None:
    """Write demo.json: the first document whose 32 questions are all answered, each asked alone.

    It has 950 to 1,000 tokens; four questions are of each kind.
    """
    model, tokenizer = load_exported(args.threads)
    for number in count(1):
        rng = random.Random(f"demo-{number}")
        document = make_document(rng, num_facts=77)
        num_tokens = len(tokenizer(document.text, add_special_tokens=False).input_ids)
        by_kind = [[fact for fact in document.facts if fact.kind == kind] for kind in KINDS]
        if not 950 <= num_tokens <= 1000 or min(map(len, by_kind)) < 4:
            continue
        selected = [fact for facts in by_kind for fact in rng.sample(facts, 4)]
        rng.shuffle(selected)
        if all(generate(model, tokenizer, document.text, f.question) == f.answer for f in selected):
            questions = [{"question": fact.question, "answer": fact.answer} for fact in selected]
            text = json.dumps({"document": document.text, "questions": questions}, indent=2)
            (DATA_DIR / "demo.json").write_text(text + "\n", encoding="utf-8")
            print(f"demo-{number}: {num_tokens} tokens, {len(questions)} questions")
            return


def evaluate(args: argparse.Namespace) -> None:
    """Ask `--questions` questions, each about a document of its own, and compare whole replies."""
    model, tokenizer = load_exported(args.threads)
    totals: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for number in range(args.questions):
        rng = random.Random(f"{args.seed}-{number}")
        num_facts = rng.randint(4, 80) if args.num_facts is None else args.num_facts
        document = make_document(rng, num_facts=num_facts)
        fact = rng.choice(document.facts)
        reply = generate(model, tokenizer, document.text, fact.question)
        rest = document.text[document.text.index(fact.sentence) :]
        distance = len(tokenizer(rest, add_special_tokens=False).input_ids)
        for name in ("all", fact.kind, f"distance {distance // 256 * 256:4}+"):
            totals[name] += 1
            right[name] += reply == fact.answer
        if reply != fact.answer and args.verbose:
            print(f"{number}: {fact.sentence} {fact.question} -> {reply!r}", flush=True)
    for name in sorted(totals):
        print(f"{name:14} {right[name]:4} of {totals[name]:4}  {right[name] / totals[name]:.1%}")


def main() -> None:
    """Read the command line and run one of `train`, `export`, `eval` and `demo`."""
    parser = argparse.ArgumentParser(description="Make ramify-tiny, the built-in model.")
    commands = parser.add_subparsers(required=True)

    def add_command(name: str, run: Callable[[argparse.Namespace], None]) -> Callable[..., Any]:
        command = commands.add_parser(name, help=(run.__doc__ or "").split("\n", 1)[0])
        command.set_defaults(run=run)
        return command.add_argument

    option = add_command("train", train)
    option("--state", required=True, help="directory of the checkpoints")
    option("--steps", type=int, default=820)
    option("--decay-steps", type=int, default=200)
    option("--seed", type=int, default=1)
    option("--every", type=int, default=50, help="steps between checkpoints")
    option("--threads", type=int, default=2)
    option("--compile", action="store_true", help="needs a C++ compiler")
    option = add_command("eval", evaluate)
    option("--seed", default="held-out", help="names the documents; not one of train")
    option("--questions", type=int, default=1000)
    option("--num-facts", type=int, help="of every document; by default 4 to 80")
    option("--threads", type=int, default=2)
    option("--verbose", action="store_true", help="print every wrong reply")
    option = add_command("export", export)
    option("--state", required=True, help="directory of the checkpoints")
    option = add_command("demo", demo)
    option("--threads", type=int, default=2)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
