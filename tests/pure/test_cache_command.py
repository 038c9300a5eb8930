"""`ramify cache`: what the tools for a disk tier list, verify, copy and delete."""

import errno
import io
import json
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ramify.cli import app
from ramify.cli.load import announce_load
from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.store_directory import list_identities, lock_directory
from tests.pure.store_cases import IDENTITY, PAGE_BYTES, hits, key, opened, page, put, segment_files
from tests.pure.test_segment_faults import flip_page


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A cache directory with 30 pages of one identity; page 7 is bob's."""
    root = tmp_path / "cache"
    store = opened(root)
    put(store, range(7))
    store.put_many([key(7, b"bob")], [page(7)], deadline=math.inf)
    put(store, range(8, 30))
    store.close()
    return root


def test_ls_shows_identities_with_their_fields(directory: Path) -> None:
    """Each identity with its size and the fields of which it is made."""
    other = opened(directory, identity={**IDENTITY, "weights": "w2"})
    put(other, [1])
    other.close()

    result = run("ls", "--cache-dir", directory)

    assert result.exit_code == 0
    assert len(re.findall(r" segments? ", result.stdout)) == 2
    assert "weights = w1" in result.stdout and "weights = w2" in result.stdout
    assert run("ls", "--cache-dir", directory / "missing").exit_code == 2


def test_verify_finds_and_removes_damaged_pages(directory: Path) -> None:
    """A damaged page: exit code 1, and it is gone; then all are intact."""
    store = opened(directory)
    flip_page(store, 3)
    store.close()

    kept = run("verify", "--cache-dir", directory, "--keep")
    first = run("verify", "--cache-dir", directory)
    second = run("verify", "--cache-dir", directory)

    assert (kept.exit_code, kept.stdout) == (1, "30 pages, 1 damaged\n")
    assert (first.exit_code, first.stdout) == (1, "30 pages, 1 damaged\n")
    assert (second.exit_code, second.stdout) == (0, "29 pages, 0 damaged\n")


def test_an_export_is_imported_elsewhere(directory: Path, tmp_path: Path) -> None:
    """Every page that verifies is found in the new directory; a second import changes nothing."""
    archive, target = tmp_path / "pages.tar", tmp_path / "other"
    store = opened(directory)
    flip_page(store, 3)
    store.close()

    exported = run("export", archive, "--cache-dir", directory)
    imported = run("import", archive, "--cache-dir", target)
    again = run("import", archive, "--cache-dir", target)

    assert exported.exit_code == 0 and archive.stat().st_mode & 0o777 == 0o600
    assert imported.exit_code == again.exit_code == 1  # one page is damaged
    assert imported.stdout == "30 pages, 1 damaged or refused\n"
    assert hits(opened(target), range(30)) == [n for n in range(30) if n != 3]
    assert sorted(path.name for path in target.iterdir() if path.name.startswith("import")) == []
    assert run("export", archive, "--cache-dir", directory).exit_code == 2, "overwrote an archive"


def test_an_export_that_fails_leaves_no_archive(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of one would refuse the next export."""
    archive = tmp_path / "pages.tar"

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "add", fail)
        failed = run("export", archive, "--cache-dir", directory)

    assert failed.exit_code == 2 and os.strerror(errno.ENOSPC) in failed.stderr
    assert not archive.exists()
    assert run("export", archive, "--cache-dir", directory).exit_code == 0


def test_files_that_cannot_be_deleted_are_a_line_and_no_traceback(directory: Path) -> None:
    """What the system says, and exit code 2."""
    identity = next(directory.glob("*/key")).parent
    (identity / "a directory of somebody").mkdir()

    result = run("purge", "--cache-dir", directory)

    assert result.exit_code == 2
    assert "somebody" in result.stderr and "Traceback" not in result.stderr


def test_ls_goes_on_when_a_server_deletes_a_segment(directory: Path) -> None:
    """Between the listing and a look at a file, a server beside it may evict that."""

    class Evicting(OsFileOps):
        def names(self, path: Path) -> list[str]:
            return [*super().names(path), "00000999.seg"]

    [listed] = list_identities(Evicting(), directory)

    assert listed.num_segments == len(segment_files(directory))


def test_an_import_under_another_key_is_refused(directory: Path, tmp_path: Path) -> None:
    """A directory that has the identity under its own key of names is left as it is."""
    archive, target = tmp_path / "pages.tar", tmp_path / "other"
    store = opened(target)
    put(store, [50])
    store.close()
    run("export", archive, "--cache-dir", directory)

    result = run("import", archive, "--cache-dir", target)

    assert result.exit_code == 2 and "another key" in result.stderr
    assert hits(opened(target), [0, 50]) == [50]


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", f"{'0' * 32}/../../evil", f"{'0' * 32}/evil.sh", "evil.seg"]
)
def test_an_archive_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    """Nothing but files of an export is unpacked, and nothing outside the directory."""
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo(name)
        member.size = 1
        tar.addfile(member, io.BytesIO(b"x"))

    result = run("import", archive, "--cache-dir", tmp_path / "target")

    assert result.exit_code == 2 and "no export has" in result.stderr
    assert not list(tmp_path.rglob("evil*"))[1:]


def hostile(directory: Path, archive: Path, change: str) -> None:
    """An export of a directory, changed as somebody might who wants to harm its importer."""
    source = segment_files(directory)[0].parent
    if change == "no key":
        (source / "key").unlink()
    elif change in {"huge segments", "no page bytes"}:
        path = source / "identity.json"
        stored = json.loads(path.read_text())
        field, value = (
            ("segment_bytes", 1 << 40) if change == "huge segments" else ("page_bytes", 0)
        )
        stored["fields"][field] = value
        path.write_text(json.dumps(stored))
    elif change == "two names of a number":
        segment = segment_files(directory)[0]
        (source / f"0{segment.name}").write_bytes(segment.read_bytes())
    with tarfile.open(archive, "w:gz" if change == "compressed" else "w") as tar:
        for path in sorted(source.iterdir()):
            member = tar.gettarinfo(path, f"{source.name}/{path.name}")
            if change == "sparse" and path.suffix == ".seg":
                member.pax_headers = {"GNU.sparse.size": "16384", "GNU.sparse.map": "0,16384"}
            with path.open("rb") as file:
                tar.addfile(member, file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("no key", "key file of 0 bytes"),
        ("huge segments", "segment_bytes"),
        ("no page bytes", "page_bytes 0"),
        ("two names of a number", "no export has"),
        ("compressed", "cannot be read"),
        ("sparse", "with holes"),
    ],
)
def test_a_hostile_archive_is_refused_with_a_reason(
    directory: Path, tmp_path: Path, change: str, reason: str
) -> None:
    """Sizes, names, compression and holes that no export has: exit code 2, and no identity is made."""
    archive, target = tmp_path / "evil.tar", tmp_path / "target"
    hostile(directory, archive, change)

    result = run("import", archive, "--cache-dir", target)

    assert result.exit_code == 2 and reason in " ".join(result.stderr.split())
    assert [path.name for path in target.iterdir()] == ["lock"]


def test_what_a_killed_import_leaves_is_deleted_by_the_next_writer(
    directory: Path, tmp_path: Path
) -> None:
    """Killed with everything unpacked; nothing else that looks like it goes, and a reader deletes nothing."""
    archive, target = tmp_path / "pages.tar", tmp_path / "other"
    run("export", archive, "--cache-dir", directory)
    script = (
        "import os, sys; from pathlib import Path; from ramify.kv.stores import segment_tools as tools\n"
        "tools._copy_key = lambda *_: os.kill(os.getpid(), 9)\n"
        "tools.import_archive(Path(sys.argv[1]), Path(sys.argv[2]), cache_key=None)"
    )
    killed = subprocess.run([sys.executable, "-c", script, archive, target], check=False)
    left, *_ = target.glob("import-*/*/*.seg")
    for name in ("import-notes", "import-of-2026-01"):
        (target / name).mkdir()
    (target / "import-abcdefgh").symlink_to(tmp_path)

    opened(target, read_only=True, identity={"weights": "other"}).close()
    was_left = left.exists()
    opened(target, identity={"weights": "other"}).close()

    assert killed.returncode == -9
    assert was_left and not left.exists()
    names = {path.name for path in target.glob("import-*")}
    assert names == {"import-notes", "import-of-2026-01", "import-abcdefgh"}
    assert archive.exists()
    assert run("import", archive, "--cache-dir", target).exit_code == 0


def test_a_directory_of_several_engines_names_theirs(directory: Path, tmp_path: Path) -> None:
    """To the tools, to a writer and to a reader, which would find nothing there."""
    root = tmp_path / "engines"
    root.mkdir()
    directory.rename(root / "replica-1")

    result = run("ls", "--cache-dir", root)

    assert result.exit_code == 2
    assert f"name one of them, as {root}/replica-1" in " ".join(result.stderr.split())
    for read_only in (False, True):
        with pytest.raises(ConfigError, match="replica-1"):
            opened(root, read_only=read_only)
    assert run("ls", "--cache-dir", root / "replica-1").exit_code == 0


def test_an_import_without_room_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the directory that is full, not the archive; another attempt works."""
    archive, target = tmp_path / "pages.tar", tmp_path / "other"
    run("export", archive, "--cache-dir", directory)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(tarfile.TarFile, "extractfile", fail)
        failed = run("import", archive, "--cache-dir", target)

    assert failed.exit_code == 2 and "other has no room" in " ".join(failed.stderr.split())
    assert [path.name for path in target.iterdir()] == ["lock"]
    assert run("import", archive, "--cache-dir", target).exit_code == 0


def test_an_import_is_alone(directory: Path, tmp_path: Path) -> None:
    """Beside another import, or a server, it is refused before it unpacks anything, and deletes nothing."""
    archive, target = tmp_path / "pages.tar", tmp_path / "other"
    run("export", archive, "--cache-dir", directory)
    target.mkdir()
    lock = lock_directory(OsFileOps(), target)
    (target / "import-12345678").mkdir()

    result = run("import", archive, "--cache-dir", target)
    with pytest.raises(ConfigError, match="in use by process"):
        opened(target)
    os.close(lock)

    assert result.exit_code == 2 and "in use by process" in " ".join(result.stderr.split())
    assert sorted(path.name for path in target.iterdir()) == ["import-12345678", "lock"]


def test_a_directory_in_use_is_an_error_before_a_model_loads(tmp_path: Path) -> None:
    """Nothing is written to a directory that is locked, or that is somebody else's."""
    (tmp_path / "used").mkdir()
    lock = lock_directory(OsFileOps(), tmp_path / "used")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lock").write_text("a text")

    with pytest.raises(ConfigError, match="in use by process"):
        announce_load("ramify-tiny", {"cache_dir": str(tmp_path / "used")})
    os.close(lock)
    for name in ("used", "other", "new"):
        announce_load("ramify-tiny", {"cache_dir": str(tmp_path / name)})

    assert (tmp_path / "other" / "lock").read_text() == "a text"
    assert not (tmp_path / "new").exists()


def test_an_import_into_somebody_elses_directory_creates_nothing(
    directory: Path, tmp_path: Path
) -> None:
    """A directory with other files and no lock is left as it is."""
    archive, target = tmp_path / "pages.tar", tmp_path / "home"
    run("export", archive, "--cache-dir", directory)
    target.mkdir()
    (target / "letter.txt").write_text("dear")

    result = run("import", archive, "--cache-dir", target)

    assert result.exit_code == 2 and "no cache directory" in " ".join(result.stderr.split())
    assert list(target.iterdir()) == [target / "letter.txt"]


def test_purge_deletes_what_it_names(directory: Path) -> None:
    """A tenant's pages, old segments, a whole identity."""
    by_tenant = run("purge", "--cache-dir", directory, "--tenant", "bob")
    store = opened(directory)
    left = hits(store, range(30))
    store.close()
    oldest = segment_files(directory)[0]
    os.utime(oldest, (0, 0))
    by_age = run("purge", "--cache-dir", directory, "--older-than", 1)
    num_segments = len(segment_files(directory))
    whole = run("purge", "--cache-dir", directory)

    assert by_tenant.stdout == "1 page removed\n"
    assert left == [n for n in range(30) if n != 7]
    assert by_age.stdout == "1 segment deleted\n"
    assert num_segments > 0 and not oldest.exists()
    assert whole.exit_code == 0 and segment_files(directory) == []
    assert list(directory.iterdir()) == [directory / "lock"]


def test_what_purge_deletes_stays_deleted_after_a_loss_of_power(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directories are synced after the names of segments and of the identity are gone."""
    identity = segment_files(directory)[0].parent
    synced: list[tuple[Path, int]] = []
    monkeypatch.setattr(
        OsFileOps,
        "sync_directory",
        lambda _, path: synced.append((path, len([*path.glob("*.seg"), *path.glob("*/key")]))),
    )
    for path in segment_files(directory):
        os.utime(path, (0, 0))

    run("purge", "--cache-dir", directory, "--older-than", 1)
    by_age = synced.copy()
    run("purge", "--cache-dir", directory)

    assert by_age == [(identity, 0)]
    assert synced[1:] == [(identity, 0), (directory, 0)]


def test_tools_keep_away_from_a_server(directory: Path) -> None:
    """While a server holds the directory nothing is changed; listing and --keep are possible."""
    store = opened(directory)

    refused = [
        run("verify", "--cache-dir", directory),
        run("purge", "--cache-dir", directory),
        run("export", directory / "x.tar", "--cache-dir", directory),
    ]

    assert [result.exit_code for result in refused] == [2, 2, 2]
    assert all(f"process {os.getpid()}" in result.stderr for result in refused)
    assert run("ls", "--cache-dir", directory).exit_code == 0
    assert run("verify", "--cache-dir", directory, "--keep").exit_code == 0
    assert hits(store, range(30)) == list(range(30))


def test_an_identity_is_named_where_there_are_several(directory: Path) -> None:
    """Several identities: the message lists them; the first digits name one."""
    other = opened(directory, page_bytes=PAGE_BYTES + 8)
    put(other, [1])
    name = other._directory.path.name
    other.close()

    ambiguous = run("verify", "--cache-dir", directory)
    chosen = run("verify", "--cache-dir", directory, "--identity", name[:8])

    assert ambiguous.exit_code == 2 and name in ambiguous.stderr
    assert chosen.stdout == "1 page, 0 damaged\n"


def test_encrypted_pages_need_their_key(tmp_path: Path) -> None:
    """Without the key the tools say what is missing, with it they verify."""
    pytest.importorskip("cryptography")
    from ramify.kv.stores.payload_codec import read_cache_key

    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    root = tmp_path / "cache"
    store = opened(root, cache_key=read_cache_key(path))
    put(store, range(3))
    store.close()

    without = run("verify", "--cache-dir", root)
    with_key = run("verify", "--cache-dir", root, "--cache-key", path)

    assert without.exit_code == 2 and "--cache-key" in without.stderr
    assert with_key.stdout == "3 pages, 0 damaged\n"
