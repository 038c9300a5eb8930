"""What works without the packages of an extra, and what the rest says."""

import re
import subprocess
import sys

import pytest

from ramify.errors import ENGINE_PACKAGES, MissingPackageError

HINT = re.compile(r"\w+ is not installed; run: pip install 'ramify\[cpu\]'")

# Runs code in a Python in which the packages of the engine cannot be imported.
HIDING = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ENGINE_PACKAGES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run_without_engine(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDING + code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import ramify; ramify.PrefixCache, ramify.CacheKey",
        "import ramify.analysis",
        "import ramify.analysis.simulation.kv_bytes",
        "from ramify.cli import app; sys.argv = ['ramify', '--help']; app()",
    ],
)
def test_cache_analyser_and_help_need_no_engine(code: str) -> None:
    """They import without torch and without the server's packages."""
    run = run_without_engine(code)

    assert run.returncode == 0, run.stderr


def test_a_missing_package_is_named_with_its_extra() -> None:
    """A name of the package that needs torch says what to install, as an ImportError."""
    run = run_without_engine(
        "import ramify\ntry:\n    ramify.RadixAttentionBlock\nexcept ImportError as error:\n    print(error)"
    )

    assert HINT.fullmatch(run.stdout.strip()), run


def test_a_command_without_its_packages_ends_with_a_line() -> None:
    """`ramify demo` without torch: one line on stderr and exit code 2."""
    run = run_without_engine("from ramify.cli import main; sys.argv = ['ramify', 'demo']; main()")

    assert run.returncode == 2
    assert HINT.fullmatch(run.stderr.strip().removeprefix("error: ")), run


def test_other_missing_modules_stay_what_they_are() -> None:
    """Only packages of our extras are translated."""
    assert MissingPackageError.of(ModuleNotFoundError("no", name="torch.nn")) is not None
    assert MissingPackageError.of(ModuleNotFoundError("no", name="yaml")) is None
