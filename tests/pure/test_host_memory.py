"""Free memory is what the machine and the container leave; resident memory is the process's own."""

from pathlib import Path

import pytest

from ramify.engine.execution.host_memory import free_memory, resident_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, 8 * GIB), ("max", "5", 8 * GIB), (str(3 * GIB), str(GIB), 2 * GIB)],
)
def test_the_smaller_of_machine_and_container_counts(
    tmp_path: Path, limit: str | None, used: str | None, expected: int
) -> None:
    """Without a limit it is the machine's free memory, with one what is left of it."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * 2**20} kB\n")
    if limit is not None and used is not None:
        groups = tmp_path / "sys/fs/cgroup"
        groups.mkdir(parents=True)
        (groups / "memory.max").write_text(limit + "\n")
        (groups / "memory.current").write_text(used + "\n")

    assert free_memory(tmp_path) == expected


def test_resident_memory_is_the_systems_count(tmp_path: Path) -> None:
    """0 where the system does not say."""
    assert resident_memory(tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nVmRSS:\t  2048 kB\nRssAnon:\t 1 kB\n")

    assert resident_memory(tmp_path) == 2 * 2**20
