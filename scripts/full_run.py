"""The full run of the tests: the commit at which it last passed, and what has changed since.

python scripts/full_run.py            which parts of it cover files changed since
python scripts/full_run.py record     this commit passed `make test-full`
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.full_run import TABLE, Part, read_parts  # noqa: E402 - the path comes first


def git(*args: str) -> str | None:
    """What git prints; None where it fails: no repository, or a clone without that commit."""
    command = ["git", *args]
    result = subprocess.run(  # noqa: S603 - git, with arguments of this file
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout if result.returncode == 0 else None


def report(commit: str, parts: dict[str, Part], changed: list[str] | None) -> str:
    """What of the full run should run again; `changed` is None where the commit is not in the clone."""
    if not commit:
        return "make test-full has not been recorded yet"
    head = f"make test-full last passed at {commit[:8]}"
    if changed is None:
        return f"{head}, which is not in this clone"
    counts = {name: part.num_covered(changed) for name, part in parts.items()}
    lines = [f"  {name} ({count} files)" for name, count in counts.items() if count]
    if not lines:
        return f"{head}; no file that it covers has changed since"
    return "\n".join([f"{head}; since then files have changed that these parts cover:", *lines])


def record(text: str, commit: str) -> str:
    """The table with the commit that passed.

    Raises:
        SystemExit: the files are not those of the commit, so that it is not what was tested.
    """
    if git("diff", "--name-only", commit) != "":
        sys.exit(
            f"the files are not those of {commit[:8]}: commit first, and leave them during the run"
        )
    return re.sub(r'^commit = ".*"$', f'commit = "{commit}"', text, count=1, flags=re.MULTILINE)


def main(args: list[str]) -> None:
    """Report, or record a commit."""
    text = TABLE.read_text(encoding="utf-8")
    if len(args) == 2 and args[0] == "record":
        TABLE.write_text(record(text, args[1]), encoding="utf-8")
    elif args:
        sys.exit(__doc__)
    else:
        commit, parts = read_parts(text)
        listing = git("diff", "--name-only", commit) if commit else None
        print(report(commit, parts, None if listing is None else listing.splitlines()))


if __name__ == "__main__":
    main(sys.argv[1:])
