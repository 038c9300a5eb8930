"""Mirrors of replicas' caches: in the end each has its cache's content, whatever happened to messages."""

from __future__ import annotations

from contextlib import suppress
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ramify.cache import PrefixCache
from ramify.cache.window import release_outside_window
from ramify.cluster.mirrors import Mirrors, SnapshotRequest
from ramify.errors import LeaseError
from tests.budget import examples
from tests.pure.mirrored_replica import (
    INTERVAL_S,
    MAX_INTERVAL_S,
    TIMEOUT_S,
    Message,
    Replica,
    assert_mirrored,
    kept,
)


class MirrorMachine(RuleBasedStateMachine):
    """Messages are lost, doubled, reordered and late; replicas restart; connections break."""

    @initialize(
        seed=st.integers(0, 2**32),
        stride=st.sampled_from([1, 1, 2, 3]),
        window=st.sampled_from([None, 7]),
        num_replicas=st.integers(1, 3),
    )
    def begin(self, seed: int, stride: int, window: int | None, num_replicas: int) -> None:
        self.random, self.now_s, self.window = Random(seed), 0.0, window
        self.mirrors = Mirrors(
            stride=stride,
            is_windowed=window is not None,
            snapshot_timeout_s=TIMEOUT_S,
            snapshot_interval_s=INTERVAL_S,
        )
        self.replicas: dict[str, Replica] = {}
        self.channel: list[Message] = []
        self.requests: list[SnapshotRequest] = []
        self.last_asked_s: dict[tuple[str, int], float] = {}
        for name in "abc"[:num_replicas]:
            self._start(name)

    def _start(self, name: str) -> None:
        cache = PrefixCache(self.random.randint(6, 24), 2, window=self.window)
        incarnation = self.random.getrandbits(64)
        self.replicas[name] = Replica(name, incarnation, cache, self.random.getrandbits(32))
        self.mirrors.add(name, incarnation)

    def _pick(self) -> Replica:
        return self.replicas[self.random.choice(list(self.replicas))]

    @rule(num_steps=st.integers(1, 12))
    def serve(self, num_steps: int) -> None:
        for _ in self._pick().traffic.run(num_steps):
            pass

    @rule()
    def release_heads(self) -> None:
        replica = self._pick()
        users = replica.traffic.live
        if self.window is not None and users:
            with suppress(LeaseError):
                release_outside_window(
                    replica.cache,
                    [user.lease for user in users],
                    [user.lease.num_tokens for user in users],
                )

    @rule(num_messages=st.integers(1, 12), with_digest=st.booleans())
    def exchange(self, num_messages: int, with_digest: bool) -> None:
        """Nothing is lost for a while; what is under way arrives later."""
        replica = self._pick()
        for _ in range(num_messages):
            for _ in replica.traffic.run(1):
                pass
            replica.message(with_digest=with_digest).deliver(self.mirrors)

    @rule()
    def ask_and_hear(self) -> None:
        self.now_s += 2 * INTERVAL_S
        self._ask()
        for request in self.requests:
            self.replicas[request.replica].ask(request, self.random.choice((1, 1, 3)))
        self.requests.clear()

    @rule(with_digest=st.booleans())
    def send(self, with_digest: bool) -> None:
        self.channel.append(self._pick().message(with_digest=with_digest))

    @rule()
    def deliver(self) -> None:
        if self.channel:
            self.channel.pop(0).deliver(self.mirrors)

    @rule()
    def deliver_out_of_order(self) -> None:
        if self.channel:
            self.channel.pop(self.random.randrange(len(self.channel))).deliver(self.mirrors)

    @rule()
    def deliver_twice(self) -> None:
        if self.channel:
            message = self.random.choice(self.channel)
            message.deliver(self.mirrors)
            message.deliver(self.mirrors)

    @rule()
    def lose(self) -> None:
        if self.channel and self.random.random() < 0.5:
            self.channel.pop(self.random.randrange(len(self.channel)))

    @rule()
    def lose_a_part_of_a_message(self) -> None:
        if self.channel:
            message = self.random.choice(self.channel)
            if message.part is not None and self.random.random() < 0.5:
                message.part = None
            elif message.events:
                message.events.pop(self.random.randrange(len(message.events)))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._ask()

    def _ask(self) -> None:
        for request in self.mirrors.due_snapshots(self.now_s):
            life = request.replica, request.incarnation
            assert self.now_s - self.last_asked_s.get(life, -INTERVAL_S) >= INTERVAL_S
            assert life == (request.replica, self.replicas[request.replica].incarnation)
            self.last_asked_s[life] = self.now_s
            self.requests.append(request)
        numbers = [mirror.snapshot.number for mirror in self._asked_mirrors()]
        assert len(numbers) == len(set(numbers))

    def _asked_mirrors(self):
        return [mirror for mirror in self.mirrors._mirrors.values() if mirror.snapshot is not None]

    @rule(is_lost=st.booleans())
    def hear_request(self, is_lost: bool) -> None:
        if self.requests:
            request = self.requests.pop(0)
            if not is_lost:
                self.replicas[request.replica].ask(request, self.random.choice((1, 3, 1000)))

    @rule()
    def restart(self) -> None:
        if self.random.random() < 0.2:
            self._start(self._pick().name)

    @rule()
    def reconnect(self) -> None:
        replica = self._pick()
        if self.random.random() < 0.7:
            return
        if self.random.random() < 0.5:
            self.mirrors.remove(replica.name)
            self.last_asked_s.pop((replica.name, replica.incarnation), None)
        else:
            self.mirrors.leave(replica.name)
        num_asked = len(self.requests)
        self.now_s += 2 * MAX_INTERVAL_S
        self._ask()
        assert replica.name not in [request.replica for request in self.requests[num_asked:]]
        self.mirrors.add(replica.name, replica.incarnation)

    @rule(num_steps=st.integers(1, 40))
    def busy_minute(self, num_steps: int) -> None:
        """Many small steps, most of them undisturbed: snapshots come in parts between changes."""
        calm = [self.send_and_deliver] * 12 + [self.ask_and_hear] * 2 + [self.release_heads]
        rough = [self.send_one, self.deliver_out_of_order, self.deliver_twice, self.lose]
        rough.append(self.lose_one)
        for _ in range(num_steps):
            step = self.random.choice([*calm, *rough, self.lose_a_part_of_a_message])
            step()
            self.a_mirror_that_is_up_to_date_is_right()

    def send_one(self) -> None:
        self.channel.append(self._pick().message())

    def lose_one(self) -> None:
        self._pick().message()

    def send_and_deliver(self) -> None:
        replica = self._pick()
        for _ in replica.traffic.run(1):
            pass
        message = replica.message(with_digest=self.random.random() < 0.2)
        message.deliver(self.mirrors)
        if self.random.random() < 0.1:
            self.channel.append(message)

    @invariant()
    def a_mirror_that_is_up_to_date_is_right(self) -> None:
        for replica in getattr(self, "replicas", {}).values():
            mirror = self.mirrors._mirrors[replica.name]
            if mirror.is_complete and mirror.sequence == replica.feed.digest()[0]:
                assert_mirrored(self.mirrors, replica)

    def teardown(self) -> None:
        """Without further losses every mirror becomes its cache."""
        if not hasattr(self, "replicas"):
            return
        for message in self.channel:
            message.deliver(self.mirrors)
        for num_steps in (2, 2, 0, 0):
            self.now_s += MAX_INTERVAL_S
            for request in self.mirrors.due_snapshots(self.now_s):
                self.replicas[request.replica].ask(request, max_runs=3)
            for replica in self.replicas.values():
                for _ in replica.traffic.run(num_steps):
                    pass
                while replica.request is not None:
                    replica.message().deliver(self.mirrors)
                replica.message(with_digest=True).deliver(self.mirrors)
        for replica in self.replicas.values():
            assert_mirrored(self.mirrors, replica)
        index = self.mirrors.index
        while index._swept:
            index.sweep(1000)
        union = {
            name for replica in self.replicas.values() for name in kept(replica.cache, index.stride)
        }
        assert len(index) == len(union)


MirrorMachine.TestCase.settings = settings(
    max_examples=examples(400), stateful_step_count=60, deadline=None
)
TestMirrorMachine = MirrorMachine.TestCase
