"""How byte-level BPE splits texts into words: regular expressions by the names that GGUF files have for them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from ramify.engine.text.ranked_bpe import LLAMA3_PATTERN

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"
)
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
)
SEED_CODER = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
# Words by the case of their letters: any upper ones, then lower ones, or the other way round.
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{_LOWER}|{_UPPER}|\p{{N}}|{_SYMBOLS}|{SPACES}"
GPT4O = rf"{_LOWER}{CONTRACTIONS}?|{_UPPER}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{SPACES}"
DIGITS, CJK = r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
)
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# What llama.cpp falls back to.
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How texts become words.

    Args:
        patterns: each cuts the pieces that the one before it has left; what lies between two of its
            matches is a piece too.
        normalises: texts are brought to Unicode's form C first.
        ignores_merges: a word that is a token is that token, whether merges lead to it or not.
        adds_bos: texts begin with the token of that role, if the file does not say.
    """

    patterns: tuple[str, ...]
    normalises: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Cuts texts, and writes their bytes in the letters of byte-level vocabularies."""
        splits = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, letters])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What is done to a text first; None: nothing."""
        return normalizers.NFC() if self.normalises else None


_LLAMA3 = Splitting((LLAMA3_PATTERN,), ignores_merges=True, adds_bos=True)
_GPT4 = Splitting((LLAMA3_PATTERN,))
_GPT2 = Splitting((GPT2,))
_SINGLE_DIGITS = Splitting((r"\p{N}", GPT2))
_QWEN2 = Splitting((QWEN2,), normalises=True)
_GPT4O = Splitting((GPT4O,))
_DEEPSEEK3 = Splitting((DIGITS, CJK, DEEPSEEK3))
FALLBACK = Splitting(DEFAULT)
# By `tokenizer.ggml.pre`.
SPLITTINGS: dict[str, Splitting] = {
    "default": FALLBACK,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "trillion", "mpt"), _GPT2),
    "olmo": Splitting((GPT2,), normalises=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    "command-r": Splitting((r"\p{N}", GPT2), normalises=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan"), Splitting((QWEN2,))),
    "qwen35": Splitting((QWEN35,), normalises=True),
    "seed-coder": Splitting((SEED_CODER,)),
    "tekken": Splitting((TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": Splitting(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splitting((BLOOM,))),
    "viking": Splitting((BLOOM, r"\p{N}")),
}
