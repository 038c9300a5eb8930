"""Text of planted logs: prose, clocks, ids, paths and states in shapes common and rare. Stdlib only."""

from __future__ import annotations

import base64
import datetime as dt
import random
from collections.abc import Callable

_WHO = "the customer,a new colleague,the reviewer,our partner,the operator,an auditor,the buyer,a caller".split(
    ","
)
_DOES = "asks about,reports,wants to change,disputes,forgets,repeats,confirms,postpones".split(",")
_WHAT = (
    "the delivery window,an invoice,the warranty terms,a failed login,the loading dock,a broken seal,"
    "the migration plan,two-factor codes,the pump schedule,a missing part,the audit trail,their voucher,"
    "the release notes,a spare key,the tram timetable,an export licence,the greenhouse sensors,a refund"
).split(",")
_THEN = (
    "answer in two sentences,check the handbook first,ask for the contract number,stay factual,"
    "escalate to the second line,quote the relevant paragraph,offer a call back,never guess,"
    "name the next step,keep the tone warm,list the open points,say what is not known,"
    "refer to the price list,write down the reason,close the topic politely,suggest a date"
).split(",")
_WHEN = "When,If,Whenever,Should it happen that,In case,As soon as,Even if,Provided that".split(",")
_NAMES = (
    "Alice,Bruno,Chiara,Deniz,Emeka,Farid,Greta,Hiroshi,Ines,Jamal,Katrin,Lucía,Mbali,Noor".split(
        ","
    )
)
_TOPICS = (
    "tides,violins,bridges,sourdough,glaciers,compilers,beekeeping,aqueducts,typography,kites,"
    "tunnels,orchids,lighthouses,chess,ferries,quilts,volcanoes,clocks,canals,falcons"
).split(",")

Rng = random.Random
Epoch = float


def sentence(rng: Rng) -> str:
    """A rule or remark; about a million different."""
    words = (rng.choice(pool) for pool in (_WHEN, _WHO, _DOES, _WHAT, _THEN))
    when, who, does, what, then = words
    return f"{when} {who} {does} {what}, {then}."


def prose(rng: Rng, num_chars: int, *, paragraph: int = 4) -> str:
    """Paragraphs of at least this many code points."""
    sentences: list[str] = []
    length = 0
    while length < num_chars:
        sentences.append(sentence(rng))
        length += len(sentences[-1]) + 1
    groups = [sentences[at : at + paragraph] for at in range(0, len(sentences), paragraph)]
    return "\n\n".join(" ".join(group) for group in groups)


def name(rng: Rng) -> str:
    """A first name."""
    return rng.choice(_NAMES)


def topic(rng: Rng) -> str:
    """A subject of questions."""
    return rng.choice(_TOPICS)


def _utc(at: Epoch) -> dt.datetime:
    return dt.datetime.fromtimestamp(at, dt.UTC)


_GERMAN_DAYS = "Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag".split()
_SPANISH = "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre".split()
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
_FRENCH = (
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize "
    "dix-sept dix-huit dix-neuf vingt vingt-et-un vingt-deux vingt-trois"
).split()


def _spelled(number: int) -> str:
    if number <= 20:
        return _SMALL[number]
    tens = "twenty thirty forty fifty".split()[number // 10 - 2]
    return tens if number % 10 == 0 else f"{tens}-{_SMALL[number % 10]}"


def _stardate(at: Epoch) -> str:
    return f"Stardate {40000 + (at % 31_536_000) / 31_536:.2f}.{int(at) % 60:02d}"


def _swatch(at: Epoch) -> str:
    return f"@{((at + 3600) % 86400) / 86.4:07.3f} .beats"


# Every clock changes at least once a minute, so that consecutive requests mostly differ.
CLOCKS: dict[str, Callable[[Epoch], str]] = {
    "iso": lambda at: _utc(at).strftime("Current time: %Y-%m-%dT%H:%M:%SZ"),
    "iso_ms": lambda at: (
        _utc(at).strftime("now=%Y-%m-%d %H:%M:%S.") + f"{int(at * 1000) % 1000:03d}"
    ),
    "us": lambda at: _utc(at).strftime("It is now %A, %B %d, %Y, %I:%M %p UTC."),
    "ctime": lambda at: _utc(at).strftime("Date: %a, %d %b %Y %H:%M:%S GMT"),
    "unix": lambda at: f"Unix time of this request: {int(at)}",
    "unix_ms": lambda at: f"<timestamp>{int(at * 1000)}</timestamp>",
    "german": lambda at: (
        f"Heute ist {_GERMAN_DAYS[_utc(at).weekday()]}, der {_utc(at).day}. "
        f"November {_utc(at).year}, {_utc(at).hour} Uhr {_utc(at).minute:02d}."
    ),
    "clock_only": lambda at: _utc(at).strftime("The local time is %H:%M."),
}
RARE_CLOCKS: dict[str, Callable[[Epoch], str]] = {
    "stardate": _stardate,
    "swatch": _swatch,
    "spelled": lambda at: (
        f"At the tone the time is {_spelled(_utc(at).hour)} hours and {_spelled(_utc(at).minute)} minutes."
    ),
    "french": lambda at: (
        f"Nous sommes le {_utc(at).day} novembre, il est {_FRENCH[_utc(at).hour]} heures "
        f"et {_utc(at).minute} minutes."
    ),
    "spanish": lambda at: (
        f"Hoy es {_utc(at).day} de {_SPANISH[_utc(at).month - 1]}, son las {_utc(at).hour} "
        f"y {_utc(at).minute}."
    ),
    "japanese": lambda at: (
        f"現在時刻:令和{_utc(at).year - 2018}年{_utc(at).month}月{_utc(at).day}日"
        f"{_utc(at).hour}時{_utc(at).minute:02d}分"
    ),
    "julian": lambda at: f"Julian date {at / 86400 + 2440587.5:.5f}",
    "week": lambda at: _utc(at).strftime("Calendar G-W%V-%u T%H%M"),
    "fiscal": lambda at: (
        _utc(at).strftime("Fiscal week FY27/W%V, day %u, shift minute ") + str(int(at // 60) % 480)
    ),
    "relative": lambda at: f"The user's last sign-in was {int(at // 20) % 900 + 3} minutes ago.",
    "uptime": lambda at: (
        f"Uptime T+{int(at) % 900_000 // 3600:03d}:{int(at) % 3600 // 60:02d}:{int(at) % 60:02d}"
    ),
    "military": lambda at: _utc(at).strftime("DTG %d%H%MZ NOV 26"),
}


def _letters(rng: Rng, alphabet: str, length: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(length))


_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_NANO = "useandom-26T198340PX75pxJACKVERYMINDBUSHWOLF_GQZbfghjklqvwyzrict"
_ADJECTIVES = (
    "brave calm dusty eager fuzzy gentle hasty icy jolly keen lucky misty noble odd proud".split()
)
_ANIMALS = (
    "otter lynx heron badger marten ibex stork gecko civet dingo egret finch gibbon hare".split()
)
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"


def uuid4(rng: Rng) -> str:
    """A random UUID."""
    bits = f"{rng.getrandbits(128):032x}"
    return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{rng.choice('89ab')}{bits[17:20]}-{bits[20:]}"


def _proquint(rng: Rng) -> str:
    def half() -> str:
        return "".join(
            rng.choice(pool) for pool in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
        )

    return f"{half()}-{half()}"


IDS: dict[str, Callable[[Rng], str]] = {
    "uuid": uuid4,
    "hex": lambda rng: f"{rng.getrandbits(64):016x}",
    "short": lambda rng: f"req_{_letters(rng, _BASE58, 24)}",
    "sha": lambda rng: f"{rng.getrandbits(160):040x}",
    "snowflake": lambda rng: str(rng.randrange(10**17, 10**18)),
}
RARE_IDS: dict[str, Callable[[Rng], str]] = {
    "base32": lambda rng: base64.b32encode(rng.randbytes(10)).decode(),
    "ulid": lambda rng: "01KAX" + _letters(rng, _CROCKFORD, 21),
    "nanoid": lambda rng: _letters(rng, _NANO, 21),
    "ksuid": lambda rng: "2x" + _letters(rng, _BASE58, 25),
    "words": lambda rng: (
        f"{rng.choice(_ADJECTIVES)}-{rng.choice(_ANIMALS)}-{rng.choice(_ADJECTIVES)}{rng.randrange(100)}"
    ),
    "proquint": _proquint,
    "base64": lambda rng: base64.b64encode(rng.randbytes(15)).decode(),
    "grouped": lambda rng: "-".join(_letters(rng, _CROCKFORD, 4) for _ in range(4)),
}
ID_CUES = (
    "Request id: {}", "session={}", "Trace: {}", "[conversation {}]", "<run id=\"{}\"/>",
    "Correlation-ID {}", "nonce: {}", "Your instance is {}.",
)  # fmt: skip


def path_or_state(rng: Rng, kind: str, number: int) -> str:
    """A path or a status block with a part that changes by request."""
    scratch = rng.choice(list(IDS.values()))(rng)
    files = [f"src/{topic(rng)}/{topic(rng)}.py" for _ in range(1 + number % 3)]
    texts = {
        "cwd": f"Working directory: /tmp/run-{scratch}/work",
        "home": f"Primary working directory: /home/ci/jobs/{scratch}/checkout",
        "windows": f"cwd is C:\\Users\\runner\\AppData\\Local\\Temp\\{scratch[:12]}\\repo",
        "git": "git status:\n"
        + "\n".join(f" M {path}" for path in files)
        + f"\n({number} commits ahead)",
        "todo": f"Todo list:\n- [x] step {number}\n- [ ] step {number + 1}\n- [ ] step {number + 2}",
        "files": "Open files: " + ", ".join(files) + f" ({number} tabs)",
        "budget": f"<status>turn {number}, {200_000 - 731 * number} tokens of context left</status>",
    }
    return texts[kind]


STATES = ("cwd", "home", "windows", "git", "todo", "files", "budget")


def secret(rng: Rng) -> str:
    """A made-up credential, which no report may quote."""
    return rng.choice(
        [
            "sk-proj-" + _letters(rng, _BASE58, 44),
            "AKIA" + _letters(rng, _CROCKFORD, 16),
            "ghp_" + _letters(rng, _BASE58, 36),
            "Bearer eyJhbGciOiJIUzI1NiJ9."
            + _letters(rng, _BASE58, 40)
            + "."
            + _letters(rng, _BASE58, 30),
        ]
    )
