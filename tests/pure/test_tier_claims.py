"""Cache directories of engines that a launcher places: which one an engine gets, and gets again."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramify.cluster.tier_claims import claim_directory
from ramify.errors import ConfigError
from tests.pure.store_cases import hits, opened, put, segment_files

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytest.importorskip("starlette")

from ramify.deploy.config import DeployConfig
from ramify.deploy.engine_process import EngineProcess
from tests.pure.cluster_bench import run


def names(*claims: Any) -> list[str]:
    return [claim.directory.name for claim in claims]


def fill(directory: Path, numbers: range, written_s: float) -> None:
    """Pages of an engine that wrote last at this time."""
    store = opened(directory)
    put(store, numbers)
    store.close()
    for path in segment_files(directory):
        os.utime(path, (written_s, written_s))


def test_engines_of_one_machine_have_a_directory_each(tmp_path: Path) -> None:
    """One that has ended leaves its directory to the next."""
    first, second, third = (claim_directory(tmp_path / "cache") for _ in range(3))
    second.release()
    second.release()

    again = claim_directory(tmp_path / "cache")

    assert names(first, second, third, again) == [
        "replica-0",
        "replica-1",
        "replica-2",
        "replica-1",
    ]
    assert again.directory.stat().st_mode & 0o777 == 0o700


def test_an_engine_in_place_of_a_killed_one_finds_its_pages(tmp_path: Path) -> None:
    """While both of its neighbours run; the store takes the directory with the claim's file in it."""
    claims = [claim_directory(tmp_path)]
    script = (
        "import sys; from pathlib import Path; from ramify.cluster.tier_claims import claim_directory\n"
        "claim = claim_directory(Path(sys.argv[1])); print(claim.directory, flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    claims.append(claim_directory(tmp_path))
    store = opened(directory)
    put(store, range(5))
    store.close()
    process.send_signal(signal.SIGKILL)
    process.communicate()

    again = claim_directory(tmp_path)

    assert (directory.name, *names(*claims)) == ("replica-1", "replica-0", "replica-2")
    assert again.directory == directory
    assert hits(opened(again.directory), range(5)) == list(range(5))


def test_the_directory_that_was_written_last_is_claimed_first(tmp_path: Path) -> None:
    """Fewer engines than before take the newest pages, not the lowest numbers."""
    for number, written_s in enumerate([100.0, 300.0, 200.0]):
        fill(tmp_path / f"replica-{number}", range(3), written_s)
    (tmp_path / "replica-notes").mkdir()
    (tmp_path / "replica-7").write_text("no directory")

    claims = [claim_directory(tmp_path) for _ in range(4)]

    assert names(*claims) == ["replica-1", "replica-2", "replica-0", "replica-3"]


def test_a_directory_that_an_engine_uses_without_a_claim_is_left_to_it(tmp_path: Path) -> None:
    """As one of `ramify serve`, or one that has not ended yet after its claimant was killed."""
    store = opened(tmp_path / "replica-0")

    claim = claim_directory(tmp_path)
    store.close()

    assert names(claim, claim_directory(tmp_path)) == ["replica-1", "replica-0"]


def test_a_directory_that_cannot_be_claimed_is_refused(tmp_path: Path) -> None:
    """With the path and the reason, before an engine starts."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"/file/cache cannot be used: .*Not a directory"):
        claim_directory(tmp_path / "file" / "cache")


def process_of(root: Path, *, memory_parts: int = 2, **fields: Any) -> EngineProcess:
    engine = {"cache_dir": str(root), "cache_disk": "12GB", **fields.pop("engine", {})}
    config = DeployConfig(engine=engine, **fields)
    return EngineProcess(config, "127.0.0.1", memory_parts=memory_parts)


def options_of(process: EngineProcess) -> dict[str, Any]:
    return process._child._spec.engine


def test_engines_that_ray_places_claim_directories(tmp_path: Path) -> None:
    """Also where there is one, whose successor may start before it has ended; readers claim none."""
    first, second = process_of(tmp_path), process_of(tmp_path, surge=True)
    alone = process_of(tmp_path / "alone", memory_parts=1)
    reader = process_of(tmp_path, engine={"cache_dir_readonly": True})
    run(first.stop())

    again = process_of(tmp_path)

    assert options_of(first) == {"cache_dir": f"{tmp_path}/replica-0", "cache_disk": "6000000000"}
    assert options_of(second) == {"cache_dir": f"{tmp_path}/replica-1", "cache_disk": "3000000000"}
    assert options_of(again) == options_of(first)
    assert options_of(alone)["cache_dir"] == f"{tmp_path}/alone/replica-0"
    assert options_of(reader)["cache_dir"] == str(tmp_path)


def test_an_engine_that_cannot_be_made_leaves_its_directory(tmp_path: Path) -> None:
    """Options that are refused after the claim: the next engine of this process gets the directory."""
    engine = {"cache_dir": str(tmp_path), "cache_disk": "much"}

    with pytest.raises(ConfigError, match="cache_disk"):
        EngineProcess(DeployConfig(engine=engine), "127.0.0.1", memory_parts=1)

    assert names(claim_directory(tmp_path)) == ["replica-0"]


def test_a_store_whose_lock_cannot_be_taken_leaves_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that has no locks for it: the error is said, and nothing stays locked."""
    flock, calls = fcntl.flock, list[int]()

    def without_locks(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOLCK, "No locks available")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", without_locks)

    with pytest.raises(ConfigError, match="No locks available"):
        claim_directory(tmp_path)

    assert names(claim_directory(tmp_path)) == ["replica-0"]
