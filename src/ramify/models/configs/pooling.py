"""Pooling of an embedding checkpoint: mode and prompts, from files of sentence-transformers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.errors import (
    CheckpointError,
    InvalidParamsError,
    PromptPoolingError,
    UnsupportedModelError,
)
from ramify.models.configs.fields import read_json, read_json_value, read_optional_json
from ramify.params import PoolingMode

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
PROMPTS = "config_sentence_transformers.json"
# Modes by their names as `pooling_mode` (sentence-transformers 6) and as flags `pooling_mode_…` (5).
MODES: dict[str, PoolingMode] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
}
FLAG = "pooling_mode_"
LEFT_OUT = (
    "its mean leaves out the prompt's tokens (include_prompt is false), which is not supported"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Pooling of hidden states to a vector; the defaults are those of a checkpoint that says nothing."""

    mode: PoolingMode = "last"
    is_normalised: bool = True  # vectors have length 1
    prompts: Mapping[str, str] = field(default_factory=dict)  # name -> text before an input
    default_prompt: str | None = None  # name of the prompt of inputs that name none
    pools_prompt: bool = True  # tokens of the prompt count in the mean
    refusal: str | None = None  # why this engine cannot compute the checkpoint's vectors

    def check(self) -> None:
        """Raise UnsupportedModelError if this engine cannot compute the checkpoint's vectors."""
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)

    def prompt_text(self, name: str | None) -> str:
        """The text before an input; `name` None: the default prompt, if there is one.

        Raises:
            InvalidParamsError: there is no such prompt, or the mean must leave its tokens out.
            PromptPoolingError: the mean must leave out the tokens of a prompt that nobody named.
        """
        if name is None:
            return self._unnamed_text(self.default_prompt)
        if name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "no other: the checkpoint has no prompts"
            raise InvalidParamsError("prompt_name", name, f"None, {known}")
        if self._leaves_out(name):
            others = [repr(other) for other in self.prompts if not self._leaves_out(other)]
            others += (
                [] if self.default_prompt and self._leaves_out(self.default_prompt) else ["None"]
            )
            raise InvalidParamsError(
                "prompt_name", name, f"{' or '.join(others) or 'that of another checkpoint'}: {LEFT_OUT}",
            )  # fmt: skip
        return self.prompts[name]

    def _leaves_out(self, name: str) -> bool:
        """Whether the mean must leave out the tokens of a prompt."""
        return bool(self.prompts[name]) and self.mode == "mean" and not self.pools_prompt

    def _unnamed_text(self, name: str | None) -> str:
        if name is None:
            return ""
        if self._leaves_out(name):
            raise PromptPoolingError(
                f"the checkpoint puts its prompt {name!r} before these texts, and {LEFT_OUT}; send token "
                "ids, which get no prompt"
            )
        return self.prompts[name]

    def role_text(self, *names: str) -> str:
        """The text before an input of some role: of the first of these prompts, else the default.

        Raises:
            PromptPoolingError: see `prompt_text`.
        """
        known = (name for name in names if name in self.prompts)
        return self._unnamed_text(next(known, self.default_prompt))


def read_pooling(path: Path) -> PoolingConfig:
    """Read the files of sentence-transformers in a checkpoint directory, as far as there are any.

    Raises:
        CheckpointError: a file is unreadable, or a value has the wrong type.
    """
    kinds = _module_kinds(path)
    prompts, default_prompt = _prompts(path)
    has_pooling = "Pooling" in kinds or (not kinds and (path / POOLING).is_file())
    file = path / kinds.get("Pooling", "1_Pooling") / "config.json"
    mode, pools_prompt, refusal = _mode(file) if has_pooling else ("last", True, None)
    foreign = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    if foreign:
        refusal = (
            f"{path / MODULES}: embeddings of this checkpoint pass a module {', '.join(foreign)}, "
            "which Ramify does not have; it has Transformer, Pooling and Normalize"
        )
    return PoolingConfig(
        mode=mode,
        is_normalised=not kinds or "Normalize" in kinds,
        prompts=prompts,
        default_prompt=default_prompt,
        pools_prompt=pools_prompt,
        refusal=refusal,
    )


def _module_kinds(path: Path) -> dict[str, str]:
    """Class names in modules.json, each with its folder; {} without the file."""
    file = path / MODULES
    if not file.is_file():
        return {}
    modules = read_json_value(file)
    kinds: dict[str, str] = {}
    for module in modules if isinstance(modules, list) else [None]:
        kind, folder = (
            (module.get("type"), module.get("path", ""))
            if isinstance(module, Mapping)
            else (None, None)
        )
        if not isinstance(kind, str) or not isinstance(folder, str) or not _is_inside(folder):
            raise CheckpointError(
                f"{file}: {module!r} is not a module with a type and a path; download it again"
            )
        kinds[kind.rpartition(".")[2]] = folder
    return kinds


def _is_inside(folder: str) -> bool:
    """Whether a relative path stays in the checkpoint's directory."""
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts


def _mode(file: Path) -> tuple[PoolingMode, bool, str | None]:
    """Mode, whether it includes prompts, and why it cannot be computed if it cannot."""
    fields = read_json(file)
    named: Any = fields.get("pooling_mode")
    if named is None:
        # Of the flags, only the mean's is true where it is absent.
        flags = {FLAG + "mean_tokens": True} | {
            name: value for name, value in fields.items() if name.startswith(FLAG)
        }
        for name, value in flags.items():
            _check_bool(file, name, value)
        modes = [name.removeprefix(FLAG) for name, value in flags.items() if value]
    else:
        modes = named if isinstance(named, list) else [named]
    pools_prompt = fields.get("include_prompt", True)
    _check_bool(file, "include_prompt", pools_prompt)
    if len(modes) == 1 and isinstance(modes[0], str) and modes[0] in MODES:
        return MODES[modes[0]], pools_prompt, None
    modes_text = " and ".join(map(str, modes)) or "none"
    return "last", pools_prompt, (
        f"{file}: the pooling mode is {modes_text}; supported is one of lasttoken, mean and cls"
    )  # fmt: skip


def _check_bool(file: Path, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise CheckpointError(f"{file}: {name} is {value!r}; it must be true or false")


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Texts by name and the default's name."""
    file = path / PROMPTS
    fields = read_optional_json(file)
    prompts, default = fields.get("prompts") or {}, fields.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(v, str) for v in prompts.values()):
        raise CheckpointError(f"{file}: prompts is {prompts!r}; it must map names to texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(
            f"{file}: default_prompt_name is {default!r}, which prompts does not have: "
            f"{', '.join(map(repr, prompts)) or 'it is empty'}"
        )
    return prompts, default
