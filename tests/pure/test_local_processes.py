"""Local replicas: shares of the machine, start, restart and end. The children are fake; no model loads."""

import asyncio
import os
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ramify.cli import app
from ramify.cli.cluster_options import ClusterOptions, refuse_engine_options
from ramify.cli.serve import _cluster
from ramify.cluster.cpu_shares import CpuShare, cpu_shares, parse_cpu_list, usable_nodes
from ramify.errors import ConfigError
from tests.pure.cluster_bench import run, until

pytest.importorskip("starlette")

from ramify.cluster.local_processes import LocalOptions, LocalProcesses, ReplicaStartError
from ramify.server.run import ServeOptions

FAKE = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


def processes(
    folder: Path, num_replicas: int = 3, stop_s: float = 10.0, **engine: Any
) -> LocalProcesses:
    options = LocalOptions(
        model="none",
        engine={"folder": str(folder), **engine},
        shares=[CpuShare(2)] * num_replicas,
    )
    return LocalProcesses(options, command=FAKE, min_backoff_s=0.01, stop_s=stop_s)


def starts(folder: Path, name: int) -> list[str]:
    return (folder / f"{name}.starts").read_text().splitlines()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(folder: Path) -> set[int]:
    """The ids of all processes that were ever started."""
    return {
        int(line.split()[0])
        for path in folder.glob("*.starts")
        for line in path.read_text().splitlines()
    }


def assert_none_left(folder: Path) -> None:
    assert started(folder)
    assert not [pid for pid in started(folder) if is_alive(pid)]


# -- shares of the machine -------------------------------------------------------------------------


def test_one_node_is_shared_without_binding() -> None:
    """Cores are divided, and at least one thread computes."""
    assert cpu_shares(2, [range(8)]) == [CpuShare(4)] * 2
    assert cpu_shares(4, [range(2)]) == [CpuShare(1)] * 4


def test_replicas_are_spread_over_sockets() -> None:
    """Each is bound to one node; a single one is not."""
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]

    assert cpu_shares(4, nodes) == [CpuShare(2, (0, 1, 2, 3)), CpuShare(2, (4, 5, 6, 7))] * 2
    assert cpu_shares(1, nodes) == [CpuShare(8)]
    assert cpu_shares(2, nodes, threads=3) == [
        CpuShare(3, (0, 1, 2, 3)),
        CpuShare(3, (4, 5, 6, 7)),
    ]


@given(
    st.integers(1, 20),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.none() | st.integers(1, 9),
)
def test_all_replicas_compute_with_as_many_threads(
    num_replicas: int, sizes: list[int], threads: int | None
) -> None:
    """The bits of answers depend on the threads; no node gets more than it has unless there is one each."""
    nodes = [[100 * node + cpu for cpu in range(size)] for node, size in enumerate(sizes)]

    shares = cpu_shares(num_replicas, nodes, threads)

    assert len(shares) == num_replicas
    assert len({share.threads for share in shares}) == 1
    for node in nodes:
        here = [share.threads for share in shares if share.cpus == tuple(node)]
        assert threads or sum(here) <= max(len(node), len(here))


def test_lists_of_cores_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    """Only the cores that this process may use count; without a list there is one node."""
    usable = sorted(os.sched_getaffinity(0))
    for name, text in (("node0", f"{usable[0]}\n"), ("node1", "9000-9003,9007\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)

    assert parse_cpu_list("0-2,8\n") == {0, 1, 2, 8}
    assert usable_nodes(tmp_path) == [[usable[0]]]
    assert usable_nodes(tmp_path / "nothing") == [usable]


# -- options ---------------------------------------------------------------------------------------


def test_engine_options_are_for_the_replicas() -> None:
    """An option that another process would need is refused, not ignored."""
    refuse_engine_options({"page_size": 16, "max_waiting": 7, "offline": True}, max_waiting=7)
    with pytest.raises(ConfigError, match=r"--page-size .*`ramify replica`"):
        refuse_engine_options({"page_size": 32})


@pytest.mark.parametrize(
    "options",
    [
        ("--threads-per-replica", "2"),
        ("--cluster-secret", "f"),
        ("--cluster-certificate-name", "a"),
        ("--routing-stride", "8"),
    ],
)
def test_options_of_a_cluster_need_replicas(options: tuple[str, str]) -> None:
    """They are refused, not ignored, where one engine serves."""
    result = CliRunner().invoke(app, ["serve", "nothing", *options])

    assert result.exit_code == 2
    assert "give --replicas N" in result.output


@pytest.mark.parametrize("replicas", ["2", "127.0.0.1:1"])
def test_the_routes_of_a_cluster_have_the_stride(replicas: str) -> None:
    """With children and with replicas that run elsewhere."""
    _, open_client = _cluster(ServeOptions(), replicas, ClusterOptions(routing_stride=8))

    assert isinstance(open_client, partial)
    assert open_client.keywords["routes"].stride == 8


def test_engines_that_a_server_starts_get_its_options() -> None:
    """All that are about an engine or its process."""
    options = ServeOptions(
        model="m",
        engine={"exact": False},
        warm=Path("warm"),
        public=Path("public"),
        log_json=True,
        log_file=Path("log"),
        drain_s=5.0,
    )

    _, open_client = _cluster(options, "2", ClusterOptions())

    assert isinstance(open_client, partial)
    [local] = open_client.args
    forgotten = {
        field.name
        for field in fields(LocalOptions)
        if getattr(local, field.name) == getattr(LocalOptions(model="", shares=()), field.name)
    }
    assert forgotten == {"host", "tls"}  # of Ray's engines, which are reached from other machines


# -- processes -------------------------------------------------------------------------------------


def test_one_replica_compiles_kernels_for_all(tmp_path: Path) -> None:
    """The others wait for it, and it is started once more without its compiler; all have their threads."""

    async def main() -> None:
        local = processes(tmp_path, compiles="0")
        addresses = await local.start()
        try:
            assert set(addresses) == {"0", "1", "2"}
            assert addresses == {name: f"127.0.0.1:{pid}" for name, pid in local.pids().items()}
        finally:
            await local.stop()

    run(main())

    order = (tmp_path / "order").read_text().split()
    assert order[0] == "0"
    assert [len(starts(tmp_path, name)) for name in range(3)] == [2, 1, 1]
    assert all(line.endswith(" 2") for line in starts(tmp_path, 1))
    assert_none_left(tmp_path)


@pytest.mark.parametrize(
    ("how", "name", "words"),
    [
        ("fails", "1", "replica 1 cannot start: the model is nowhere"),
        ("fails", "0", "replica 0 cannot start: the model is nowhere"),
        ("dies", "2", "replica 2 ended before it was ready: exit code 7"),
        ("lingers", "1", "replica 1 cannot start: the model is nowhere"),
        ("shouts", "1", "replica 1 writes a line to stdout that is no report"),
    ],
)
def test_one_that_cannot_start_ends_all(tmp_path: Path, how: str, name: str, words: str) -> None:
    """The error says which and why."""
    local = processes(tmp_path, 3, 10.0, **{how: name})

    with pytest.raises(ReplicaStartError, match=words):
        run(local.start())

    assert_none_left(tmp_path)


def test_what_a_child_prints_is_no_report(tmp_path: Path) -> None:
    """A line of a package that prints when it is imported is logged, and the start goes on."""

    async def main() -> None:
        local = processes(tmp_path, num_replicas=2, prints="1")
        assert set(await local.start()) == {"0", "1"}
        await local.stop()

    run(main())
    assert_none_left(tmp_path)


def test_a_killed_replica_is_started_again(tmp_path: Path) -> None:
    """Its new address is told, the others are left alone, and none is left at the end."""

    async def main() -> None:
        moves: list[tuple[str, str]] = []
        local = processes(tmp_path)
        before = await local.start()
        try:
            local.keep(lambda name, address: moves.append((name, address)))
            for number in (1, 2):
                os.kill(local.pids()["1"], signal.SIGKILL)
                await until(lambda: len(moves) == number)  # noqa: B023 - waited for here
            assert [name for name, _ in moves] == ["1", "1"]
            assert len({before["1"], *(address for _, address in moves)}) == 3
            assert f"127.0.0.1:{local.pids()['0']}" == before["0"]
        finally:
            await local.stop()

    run(main())

    assert [len(starts(tmp_path, name)) for name in range(3)] == [1, 3, 1]
    assert_none_left(tmp_path)


def test_a_bug_does_not_end_the_attempts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is in the log, and the replica is started again when it ends the next time."""

    async def main() -> None:
        moves: list[str] = []

        def moved(name: str, _: str) -> None:
            moves.append(name)
            if len(moves) == 1:
                raise KeyError(name)

        local = processes(tmp_path, num_replicas=1)
        await local.start()
        try:
            local.keep(moved)
            for number in (1, 2):
                os.kill(local.pids()["0"], signal.SIGKILL)
                await until(lambda: len(moves) == number)  # noqa: B023 - waited for here
        finally:
            await local.stop()

    run(main())

    assert "replica 0 does not serve, by a bug" in caplog.text
    assert_none_left(tmp_path)


def test_a_replica_has_as_much_memory_when_it_is_started_again(tmp_path: Path) -> None:
    """The others hold their shares by then: a part of what is free would be a part of its own share."""

    async def main() -> None:
        moves: list[str] = []
        local = processes(tmp_path, num_replicas=2, pool=4096)
        await local.start()
        try:
            local.keep(lambda name, _: moves.append(name))
            os.kill(local.pids()["1"], signal.SIGKILL)
            await until(lambda: moves == ["1"])
        finally:
            await local.stop()

    run(main())
    memory = (tmp_path / "1.memory").read_text().splitlines()
    assert memory == ["2 None", "1 4096"]


def test_a_replica_is_started_again_with_the_weights_that_it_has(tmp_path: Path) -> None:
    """Those that replaced the first ones; a revision was that of the first. Others keep theirs."""

    async def main() -> None:
        moves: list[str] = []
        local = processes(tmp_path, num_replicas=2, revision="r1")
        await local.start()
        try:
            local.keep(lambda name, _: moves.append(name))
            local.use_model("1", "other")
            for number, name in enumerate("10", 1):
                os.kill(local.pids()[name], signal.SIGKILL)
                await until(lambda: len(moves) == number)  # noqa: B023 - waited for here
        finally:
            await local.stop()

    run(main())
    models = [(tmp_path / f"{name}.model").read_text().splitlines() for name in "01"]
    assert models[0][0] == models[0][1] == models[1][0]
    assert models[0][0].endswith(" r1")
    assert models[1][1] == "other None"


def test_a_replica_that_cannot_start_again_is_tried_again(tmp_path: Path) -> None:
    """Failed starts do not end the attempts."""

    async def main() -> None:
        moves: list[str] = []
        local = processes(tmp_path, num_replicas=2)
        await local.start()
        try:
            blocker = tmp_path / "1.starts"
            count = len(blocker.read_text().splitlines())
            blocker.rename(tmp_path / "kept")
            blocker.mkdir()  # a start fails, as it cannot write there
            local.keep(lambda name, _: moves.append(name))
            os.kill(local.pids()["1"], signal.SIGKILL)
            await until(lambda: "1" not in local.pids())
            await asyncio.sleep(0.3)
            assert not moves
            blocker.rmdir()
            await until(lambda: moves == ["1"])
            assert count == 1
        finally:
            await local.stop()

    run(main())
    assert_none_left(tmp_path)


def test_the_end_does_not_wait_for_a_stopped_process(tmp_path: Path) -> None:
    """One that takes no signal is killed."""

    async def main() -> None:
        local = processes(tmp_path, num_replicas=2, stop_s=0.2)
        await local.start()
        os.kill(local.pids()["0"], signal.SIGSTOP)
        await local.stop()

    run(main())
    assert_none_left(tmp_path)
