"""`LeastLoaded`: routes that know no cache, for tests of everything else."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ramify.cluster.decisions import Decision, Refusal
from ramify.cluster.routes import HotPrompt, MirrorState
from ramify.cluster.wire import Load, Run, SnapshotPart, TakeSnapshot, Welcome
from ramify.server.replicas import RoutingCounts


class LeastLoaded:
    """The replica with the fewest live requests of this server; ties rotate. Knows no cache."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._replicas: dict[int, str] = {}  # by reservation
        self._drained: set[str] = set()
        self._turn = 0

    def joined(self, replica: str, welcome: Welcome) -> None:
        """See `Routes`."""
        del welcome
        self._live[replica] = 0
        self._drained.discard(replica)

    def draining(self, replica: str) -> None:
        """See `Routes`."""
        self._drained.add(replica)

    def left(self, replica: str) -> None:
        """See `Routes`."""
        del self._live[replica]
        self._replicas = {
            number: name for number, name in self._replicas.items() if name != replica
        }

    def forgotten(self, replica: str) -> None:
        """See `Routes`."""

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        max_tokens: int | None = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        """See `Routes`."""
        del page_hashes, num_tokens, max_tokens, beyond_limits
        names = sorted(self._live.keys() - self._drained - set(exclude))
        if not names:
            return Refusal("no replica", 1.0)
        turn = (self._turn + 1) % len(names)
        replica = min(names[turn:] + names[:turn], key=lambda name: self._live[name])
        return self._reserve(replica, "least work")

    def _reserve(self, replica: str, reason: str) -> Decision:
        self._turn += 1
        self._live[replica] += 1
        self._replicas[self._turn] = replica
        return Decision(replica, reason, self._turn)

    def assign(
        self, replica: str, page_hashes: Sequence[bytes], num_tokens: int
    ) -> Decision | Refusal:
        """See `Routes`."""
        del page_hashes, num_tokens
        if replica not in self._live.keys() - self._drained:
            return Refusal("no replica", 1.0)
        return self._reserve(replica, "assigned")

    def note(self, page_hashes: Sequence[bytes], num_shared: int, prompt: HotPrompt) -> None:
        """See `Routes`."""

    def missing(self, replica: str, max_pages: int) -> list[HotPrompt]:
        """See `Routes`."""
        del replica, max_pages
        return []

    def is_known(self, replica: str) -> bool:
        """See `Routes`."""
        return replica in self._live

    def admitted(self, reservation: int) -> None:
        """See `Routes`."""

    def first_token(self, reservation: int) -> None:
        """See `Routes`."""

    def finished(
        self, reservation: int, num_output: int = 0, cached_tokens: int | None = None
    ) -> None:
        """See `Routes`."""
        del num_output, cached_tokens
        self.failed(reservation)

    def failed(self, reservation: int) -> None:
        """See `Routes`."""
        replica = self._replicas.pop(reservation, None)
        if replica is not None:
            self._live[replica] -= 1

    @property
    def num_reserved(self) -> int:
        """Reservations that have not ended."""
        return len(self._replicas)

    def load(self, replica: str, load: Load) -> None:
        """See `Routes`."""

    def apply(self, replica: str, incarnation: int, runs: Sequence[Run], num_lost: int) -> None:
        """See `Routes`."""

    def snapshot(self, replica: str, incarnation: int, part: SnapshotPart) -> None:
        """See `Routes`."""

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        """See `Routes`."""

    def due_snapshots(self, now: float) -> Sequence[tuple[str, TakeSnapshot]]:
        """See `Routes`."""
        del now
        return ()

    def mirror(self, replica: str) -> MirrorState:
        """See `Routes`."""
        del replica
        return MirrorState()

    def counts(self, refusals: Mapping[str, int], reroutes: int, resumptions: int) -> RoutingCounts:
        """See `Routes`."""
        return RoutingCounts({}, refusals, reroutes=reroutes, resumptions=resumptions)
