"""Weights are replaced under load: no request fails, none has tokens of two models, hits go on."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ramify.cluster.client import ClusterLLM
from ramify.errors import CheckpointError, ConfigError, ReplicaLostError, RolloutError
from ramify.params import SamplingParams
from tests.pure.cluster_bench import ClusterBench, answer_of, prompts, run, until
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
PROMPT = prompts(1)[0]
TOKENS = SamplingParams(max_tokens=24, ignore_eos=True)


class Clients:
    """Tasks that send one request after the other, and check that each answer is whole."""

    def __init__(self, llm: ClusterLLM, count: int) -> None:
        self.llm, self.is_over = llm, False
        self.answers: list[str] = []  # the model of each, in the order of their ends
        self.tasks = [asyncio.ensure_future(self._send(prompt)) for prompt in prompts(count)]

    async def _send(self, prompt: Sequence[int]) -> None:
        while not self.is_over:
            delivered: list[int] = []
            output = None
            async for event in self.llm.stream(prompt, TOKENS):
                delivered += event.new_token_ids
                output = event.output
            assert output is not None
            assert output.error is None
            assert list(output.token_ids) == delivered
            models = [m for m in ("old", "new") if answer_of(m, prompt, 24) == delivered]
            assert len(models) == 1, delivered
            self.answers += models

    async def stop(self) -> list[str]:
        self.is_over = True
        await asyncio.gather(*self.tasks)
        return self.answers


async def has_hit(llm: ClusterLLM) -> bool:
    """Whether a prompt that was answered before is routed to its pages, and hits them."""
    await until(lambda: llm.dispatch.num_live == 0)
    await llm.generate(PROMPT, TOKENS)
    counters = llm.dispatch.routes.router.counters  # type: ignore[attr-defined]
    before = counters.cached_tokens, counters.predicted_tokens
    output = await llm.generate(PROMPT, TOKENS)
    cached, predicted = counters.cached_tokens, counters.predicted_tokens
    return output.cache.read_tokens == 8 and (cached, predicted) == (before[0] + 8, before[1] + 8)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_weights_are_replaced_under_load(num_replicas: int) -> None:
    """0 failed, 0 repeated tokens, no answer of two models; afterwards prompts hit as before."""
    bench = ClusterBench(num_replicas)

    async def main() -> None:
        async with bench.running():
            await bench.llm.reload_weights("old")
            clients = Clients(bench.llm, 12)
            await until(lambda: len(clients.answers) > 12)
            await bench.llm.reload_weights("new")
            num_before = len(clients.answers)
            await until(lambda: len(clients.answers) > num_before + 24)
            answers = await clients.stop()
            assert set(answers[:12]) == {"old"}
            assert set(answers[-12:]) == {"new"}
            assert len({m.replica._welcome.identity for m in bench.members}) == 1  # type: ignore[union-attr]
            assert bench.llm.dispatch.reference is not None
            assert bench.llm.dispatch.reference.namespace == b"new"
            assert bench.llm.dispatch.members.namespaces() == [b"new"]
            await until(lambda: bench.llm.dispatch.num_live == 0)
            assert await has_hit(bench.llm)
            assert bench.llm.dispatch.num_resumptions == 0

    run(main())


def test_both_versions_hit_while_they_are_side_by_side() -> None:
    """A prompt is hashed in each namespace: it goes where its prefix is, whatever the weights."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.dispatch.replicas["1"].replace_weights("new")
            await until(lambda: bench.llm.dispatch.replicas["1"].is_ready)
            assert len(bench.llm.dispatch.members.namespaces()) == 2
            for member in bench.members:  # each has another prompt
                prompt = prompts(2)[bench.members.index(member)]
                other = bench.llm.dispatch.replicas[str(1 - bench.members.index(member))]
                other.is_draining = True
                await bench.llm.generate(prompt, TOKENS)
                other.is_draining = False
            for _ in range(4):
                for prompt in prompts(2):
                    output = await bench.llm.generate(prompt, TOKENS)
                    assert output.cache.read_tokens == 8

    run(main())


def test_an_answer_is_never_continued_with_other_weights() -> None:
    """With tokens it ends with an error; without any it begins anew with the weights that are there."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.dispatch.replicas["1"].replace_weights("new")
            await until(lambda: bench.llm.dispatch.replicas["1"].is_ready)
            first = bench.members[0]
            first.gate.is_open = False
            bench.llm.dispatch.replicas["1"].is_draining = True
            with_tokens = bench.llm.stream(PROMPT, TOKENS)
            await with_tokens.accepted()
            first.gate.allowed.release()
            await anext(with_tokens)
            without = asyncio.ensure_future(bench.llm.generate(prompts(2)[1], TOKENS))
            await until(lambda: bench.llm.dispatch.num_live == 2)
            bench.llm.dispatch.replicas["1"].is_draining = False
            await first.kill()
            ended = [event async for event in with_tokens][-1].output
            begun = await without
            assert ended is not None
            assert isinstance(ended.error, ReplicaLostError)
            assert list(begun.token_ids) == answer_of("new", prompts(2)[1], 24)
            assert not begun.resumed

    run(main())


def test_a_failure_at_the_first_replica_changes_nothing() -> None:
    """The error is that of one engine, and every replica serves."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            with pytest.raises(CheckpointError, match="'broken' cannot be read"):
                await bench.llm.reload_weights("broken")
            assert all(replica.is_ready for replica in bench.llm.dispatch.replicas.values())
            assert (await bench.llm.generate(PROMPT, TOKENS)).error is None

    run(main())


def test_a_failure_at_a_later_replica_names_those_that_have_changed() -> None:
    """All serve, each with its weights; another call makes them equal."""
    bench = ClusterBench(3)

    async def main() -> None:
        async with bench.running():
            llm: Any = bench.members[1].llm
            load = llm.load_weights
            llm.load_weights = lambda _: load("broken")
            with pytest.raises(RolloutError, match="replica 1 has other weights") as info:
                await bench.llm.reload_weights("new")
            assert info.value.done == ("0",)
            assert len(bench.llm.dispatch.members.namespaces()) == 2
            llm.load_weights = load
            await bench.llm.reload_weights("new")
            assert bench.llm.dispatch.members.namespaces() == [b"new"]

    run(main())


def test_one_call_at_a_time() -> None:
    """A second one is refused while the first goes on, by the server and by a replica."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            first = bench.members[0]
            first.gate.is_open = False
            live = [asyncio.ensure_future(bench.llm.generate(p, TOKENS)) for p in prompts(4)]
            await first.gate.arrive()
            rolling = asyncio.ensure_future(bench.llm.reload_weights("new"))
            await until(lambda: bench.llm.dispatch.replicas["0"].is_draining)
            with pytest.raises(ConfigError, match="being replaced"):
                await bench.llm.reload_weights("other")
            with pytest.raises(ConfigError, match="being replaced"):
                await bench.llm.dispatch.replicas["0"].replace_weights("other")
            first.gate.open()
            await rolling
            assert all(output.error is None for output in await asyncio.gather(*live))

    run(main())


def test_another_server_of_the_replicas_notices_nothing() -> None:
    """It sends its requests elsewhere meanwhile, and learns the weights."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            await bench.llm.reload_weights("old")
            addresses = {name: r.address for name, r in bench.llm.dispatch.replicas.items()}
            other = ClusterLLM(addresses, None)
            await other.start(10.0)
            await other.all_ready(10.0)
            clients = Clients(other, 6)
            await until(lambda: len(clients.answers) > 6)
            await bench.llm.reload_weights("new")
            await other.all_ready(10.0)
            assert other.dispatch.members.namespaces() == [b"new"]
            num_before = len(clients.answers)
            await until(lambda: len(clients.answers) > num_before + 12)
            assert set((await clients.stop())[-6:]) == {"new"}
            await other.aclose()

    run(main())


def test_a_replica_goes_on_when_the_server_that_asked_has_gone() -> None:
    """It is not left between two models."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            member.gate.is_open = False
            live = asyncio.ensure_future(bench.llm.generate(PROMPT, TOKENS))
            await member.gate.arrive()
            addresses = {name: r.address for name, r in bench.llm.dispatch.replicas.items()}
            other = ClusterLLM(addresses, None)
            await other.start(10.0)
            rolling = asyncio.ensure_future(other.reload_weights("new"))
            await until(lambda: bench.llm.dispatch.replicas["0"].is_updating)
            rolling.cancel()
            await other.aclose()
            member.gate.open()
            assert (await live).error is None
            await until(lambda: bench.llm.dispatch.members.namespaces() == [b"new"])
            output = await bench.llm.generate(PROMPT, TOKENS)
            assert list(output.token_ids) == answer_of("new", PROMPT, 24)

    run(main())


def test_a_replica_that_was_started_again_with_other_weights_is_hit() -> None:
    """An operator ends one after the other; what the server knows of the first is not what counts."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            for name, member in enumerate(bench.members):
                assert await member.replica.drain(10.0)
                await member.start_again()
                await member.replica.replace_weights("new")
                for connection in member.replica._connections:
                    connection.close()
                replica = bench.llm.dispatch.replicas[str(name)]
                await until(
                    lambda replica=replica: replica.is_ready and replica.welcome.namespace == b"new"  # type: ignore[misc]
                )
            assert await has_hit(bench.llm)

    run(main())


def test_a_failure_after_the_weights_were_installed_shows_them() -> None:
    """Else an answer of the weights of before would go on here, with others."""
    bench = ClusterBench(1)

    async def main() -> None:
        async with bench.running():
            member = bench.members[0]
            llm: Any = member.llm
            install = llm.install_weights

            async def half(weights: Any) -> None:
                await install(weights)
                raise CheckpointError("the tiers cannot be opened again")

            llm.install_weights = half
            with pytest.raises(CheckpointError, match="the tiers cannot"):
                await bench.llm.reload_weights("new")
            await bench.llm.all_ready(10.0)
            welcome = bench.llm.dispatch.replicas["0"].welcome
            assert welcome is not None
            assert (welcome.namespace, welcome.identity) == (b"new", member.llm._core_identity)
            output = await bench.llm.generate(PROMPT, TOKENS)
            assert list(output.token_ids) == answer_of("new", PROMPT, 24)

    run(main())


def test_weights_are_in_use_though_prompts_are_not_warm(caplog: pytest.LogCaptureFixture) -> None:
    """The request succeeds, and the log says what has failed; an error or a bug."""
    bench = ClusterBench(1)
    errors: list[Exception] = [CheckpointError("no prompts"), KeyError("a bug")]

    async def fail() -> None:
        raise errors.pop(0)

    async def main() -> None:
        async with bench.running():
            bench.members[0].replica._warm_up = fail
            await bench.llm.reload_weights("new")
            await bench.llm.reload_weights("newer")
            assert bench.llm.dispatch.members.namespaces() == [b"newer"]

    run(main())

    assert "prompts are not warm with the weights of now: no prompts" in caplog.text
    assert "KeyError: 'a bug'" in caplog.text


def test_a_replica_that_does_not_know_its_weights_ends() -> None:
    """Whoever keeps it starts it anew; it never connects with an identity that may be wrong."""
    bench = ClusterBench(2)

    async def main() -> None:
        async with bench.running():
            llm: Any = bench.members[0].llm

            async def unknown() -> Any:
                raise CheckpointError("a file of the checkpoint is gone")

            llm.identity = unknown
            with pytest.raises(CheckpointError, match="is gone"):
                await bench.llm.reload_weights("new")
            assert not llm.health().is_alive
            for prompt in prompts(4):  # at the other one, with the weights of before
                output = await bench.llm.generate(prompt, TOKENS)
                assert list(output.token_ids) == expected(prompt, 24, ends=())

    run(main())


def test_the_weights_of_a_deployment_are_those_of_its_file() -> None:
    """An engine that is started later would have others."""
    llm = ClusterLLM({}, None, fixed_weights=True)

    with pytest.raises(ConfigError, match="change it there and deploy again"):
        run(llm.reload_weights("new"))
