"""Certificates: those of one authority connect, all others are refused, with a line at each side."""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.errors import ConfigError, NoReplicaError
from ramify.params import SamplingParams
from tests.pure.cluster_bench import Member, prompts, run
from tests.pure.engine_bench import expected

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytest.importorskip("starlette")
pytest.importorskip(
    "cryptography", reason="cryptography is not installed (pip install ramify[dev])"
)

from ramify.cluster.local_child import ChildSpec
from tests.certificates import Authority, write

PROMPT = prompts(1)[0]
SECRET = "0123456789abcdef0123"


async def connect(member: Member, credentials: Credentials | None) -> None:
    """Connect to a replica, and let it answer.

    Raises:
        NoReplicaError: it does not let this server in.
    """
    llm = ClusterLLM({"a": f"127.0.0.1:{member.port}"}, None, credentials=credentials)
    await llm.start(3.0)
    try:
        output = await llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        assert list(output.token_ids) == expected(PROMPT, 4, ends=())
    finally:
        await llm.aclose()


def test_certificates_of_one_authority_connect() -> None:
    """Alone, and with the secret; a wrong secret is refused behind right certificates."""
    authority = Authority.make("ours")

    async def main() -> None:
        member = Member()
        await member.start(authority.credentials(secret=SECRET))
        await connect(member, authority.credentials(secret=SECRET))
        with pytest.raises(NoReplicaError, match="secret of the cluster"):
            await connect(member, authority.credentials())
        await member.replica.close()
        other = Member()
        await other.start(authority.credentials())
        await connect(other, authority.credentials())
        await other.replica.close()

    run(main())


WRONG = {
    "another authority": (
        lambda ours, theirs: theirs.credentials(secret=SECRET),
        "of one authority",
    ),
    "a key of another": (
        lambda ours, theirs: replace(ours.credentials(secret=SECRET), key=theirs.credentials().key),
        "of one authority",
    ),
    "a secret without TLS": (lambda ours, theirs: Credentials(secret=SECRET), "with certificates"),
    "nothing": (lambda ours, theirs: None, "with certificates"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_others_are_refused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The server says that certificates are missing or do not fit; the replica serves on."""
    ours, theirs = Authority.make("ours"), Authority.make("theirs")
    make, words = WRONG[kind]

    async def main() -> None:
        member = Member()
        await member.start(ours.credentials(secret=SECRET))
        with pytest.raises(NoReplicaError, match=words):
            await connect(member, make(ours, theirs))
        await connect(member, ours.credentials(secret=SECRET))
        await member.replica.close()

    with caplog.at_level(logging.WARNING):
        run(main())
    assert any(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", ["another address", "no TLS at the replica"])
def test_a_replica_that_is_not_the_one_is_refused(kind: str) -> None:
    """A certificate of our authority but of another machine; or none."""
    ours = Authority.make("ours")
    shown = ours.credentials("10.1.2.3") if "address" in kind else Credentials(secret=SECRET)

    async def main() -> None:
        member = Member()
        await member.start(shown)
        with pytest.raises(NoReplicaError, match="must name the address"):
            await connect(member, ours.credentials(secret=SECRET))
        await member.replica.close()

    run(main())


def test_a_name_takes_the_place_of_addresses() -> None:
    """One certificate for engines that are placed anywhere; another name is refused as another address."""
    ours = Authority.make("ours")

    async def main() -> None:
        member = Member()
        await member.start(ours.credentials("engine.chat"))
        await connect(member, ours.credentials(name="engine.chat"))
        for name, words in (
            ("engine.other", "must have the name 'engine.other'"),
            (None, "must name the address"),
        ):
            with pytest.raises(NoReplicaError, match=words):
                await connect(member, ours.credentials(name=name))
        await member.replica.close()

    run(main())


def test_wrong_files_are_refused_at_start(tmp_path: Path) -> None:
    """gRPC would listen with them, or say that the address cannot be bound; the line names the file."""
    ours, theirs = Authority.make("ours").credentials(), Authority.make("theirs").credentials()
    files = write(ours, tmp_path / "ours")
    other = write(theirs, tmp_path / "theirs")
    text = tmp_path / "text"
    text.write_text("no PEM")

    assert files.credentials(SECRET) == replace(ours, secret=SECRET)
    for changes, words in (
        ({"key": other.key}, "its key without a password: .*KEY_VALUES_MISMATCH"),
        ({"key": str(text)}, "text are no certificate in PEM and its key"),
        ({"certificate": str(text)}, "text and .*key are no certificate"),
        ({"authority": str(text)}, "text is no certificate in PEM"),
        ({"authority": str(tmp_path / "none")}, "none: No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            msgspec.structs.replace(files, **changes).credentials()


def test_a_name_without_certificates_is_refused(tmp_path: Path) -> None:
    """Beside a secret alone, nothing would be compared with it."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)

    with pytest.raises(ConfigError, match="is the name of replicas' certificates"):
        Credentials.from_files(secret, name="engine.chat")


def test_a_child_reads_the_files_of_its_deployment(tmp_path: Path) -> None:
    """At each start, beside the secret that it is told."""
    ours = Authority.make("ours").credentials()
    files = write(ours, tmp_path / "ours", name="engine.chat")
    spec = ChildSpec("0", "none", {}, SECRET, 1, files)

    sent = msgspec.json.decode(msgspec.json.encode(spec), type=ChildSpec)

    assert sent.options().credentials == replace(ours, secret=SECRET, name="engine.chat")
    assert msgspec.structs.replace(spec, tls=None).options().credentials == Credentials(
        secret=SECRET
    )
