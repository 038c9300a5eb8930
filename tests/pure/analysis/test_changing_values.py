"""Values that change in a text: in words, in other digits, several in one line."""

from __future__ import annotations

from hashlib import md5
from pathlib import Path

import pytest

from ramify.analysis.compare.value_shapes import are_listed_files, are_state_lines
from tests.pure.analysis.contract_log import MORE, RULES, causes, system_verdicts

POLITELY = "Answer briefly and politely. "


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("Today is Tuesday the third of March.", "Today is Wednesday the fourth of March."),
        ("It is Tuesday the third of March", "It is Thursday the twenty-first of April"),
        ("الوقت الآن ٢٠٢٦-٠٣-٠٤ ١٠:٠٧", "الوقت الآن ٢٠٢٦-٠٣-٠٤ ١١:١٩"),
        ("अब २०२६-०३-०४ १०:०७", "अब २०२६-०३-०५ ११:१९"),
        ("２０２６年３月４日", "２０２６年３月５日"),
        ("오늘은 2026년 3월 4일 수요일입니다.", "오늘은 2026년 3월 5일 목요일입니다."),
        ("วันที่ 4 มี.ค. 2569 เวลา 9:05", "วันที่ 4 มี.ค. 2569 เวลา 9:17"),
        ("Tid: 4. mars 2026 kl. 09.05", "Tid: 4. mars 2026 kl. 09.17"),
        ("Shift change in 12 minutes", "Shift change in 3 minutes"),
        ("Calendar G-W49-6 T0319", "Calendar G-W49-6 T0321"),
        ("12 minutes past nine", "20 minutes past nine"),
        ("2026-W10-3 T091502", "2026-W10-3 T093117"),
        ("Your session expires at 10:35.", "Your session expires at 10:52."),
        ("3/4/26 10am", "3/4/26 11am"),
        ("2026/03/04 10-05-33", "2026/03/04 10-07-41"),
        ("Date: 4/III/2026", "Date: 5/III/2026"),
        ("2026-063T10:00", "2026-063T11:12"),
        ("The customer joined 4 minutes ago.", "The customer joined 9 minutes ago."),
        ("Since the last backup: 1d 4h", "Since the last backup: 1d 9h"),
    ],
)
def test_two_requests_prove_a_clock_in_words_or_other_digits(
    tmp_path: Path, had: str, got: str
) -> None:
    """Two dates or times in English or in digits of any script are a clock."""
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert causes(verdict) == ["clock"]


CLOCK_WORDS = {
    "We write March {}.": "third fourth ninth tenth twelfth thirtieth",
    "It is half past {} in the afternoon.": "one two three four five six",
    "Heute ist {}, der dritte März.": "Montag Dienstag Mittwoch Donnerstag Freitag Samstag",
    "Nous sommes mardi {} mars": "trois quatre cinq six sept huit",
    "令和八年三月{}日": "二 三 四 五 六 七",
    "今天是星期{}": "一 二 三 四 五 六",
    "{} марта": "среда четверг пятница суббота воскресенье понедельник",
    "{} Μαρτίου 2026": "Δευτέρα Τρίτη Τετάρτη Πέμπτη Παρασκευή Σάββατο",
    "{} مارس": "الاثنين الثلاثاء الأربعاء الخميس الجمعة السبت",
    "{} to ten": "quarter ten five twenty nine two",
    "{} past 9": "10 12 17 20 33 41",
    "tonight at {}": "six seven eight nine ten eleven",
    "ticks {}": "638767512000000000 638767512670000000 638767514000000000 638767521000000000 638767522000000000"
    " 638767525000000000",
    "time.now={}e9": "1.772618400 1.772618467 1.772618504 1.772618599 1.772618601 1.772618777",
    "Bugün {}": "pazartesi salı çarşamba perşembe cuma cumartesi",
}


@pytest.mark.parametrize("line", CLOCK_WORDS)
def test_a_value_that_is_another_in_every_request_is_found(tmp_path: Path, line: str) -> None:
    """Whatever its language: how it behaves over six requests shows that it changes."""
    systems = [f"{RULES}\n{line.format(value)}\n{MORE}" for value in CLOCK_WORDS[line].split()]

    made = system_verdicts(tmp_path, *systems)[1:]

    assert [causes(verdict) for verdict in made] == [["clock"]] * 5
    assert {verdict["causes"][0]["kind"] for verdict in made} <= {"clock", "unknown"}


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("Answer in three sentences.", "Answer in four sentences."),
        ("The user is April Summers.", "The user is May Winters."),
        ("You work for the second team in Paris.", "You work for the third team in Paris."),
        ("Answer in five to ten sentences.", "Answer in ten to twelve sentences."),
        ("Read chapters five to ten of it.", "Read chapters six to nine of it."),
        ("The order was placed on 2026-01-02.", "The order was placed on 2026-01-05."),
        ("Born 1971-02-03, patient Anna", "Born 1983-11-04, patient Boris"),
        ("Version 2.3.1 of the manual applies.", "Version 2.4.0 of the manual applies."),
        ("Release: 3.2.26", "Release: 3.2.28"),
        ("Loyalty points: 120", "Loyalty points: 340"),
        ("Basket of 3 books", "Basket of 7 books"),
        ("Beds free on ward B: 4 of 12", "Beds free on ward B: 9 of 12"),
        ("Growth factor 1.204", "Growth factor 1.377"),
    ],
)
def test_numbers_names_and_dates_of_events_are_no_clock(tmp_path: Path, had: str, got: str) -> None:
    """A number in words convicts only beside a day, a month or a part of the day.

    A name never does, nor does the date on which something happened.
    """
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert causes(verdict) == ["new_content"]


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("boot 9f3a", "boot 77c1"),
        ("cache-bust: 0.8231740091", "cache-bust: 0.1172883412"),
        ("corr=4f:9a:22:b1:07:ce", "corr=1b:00:de:9c:41:77"),
        ("agent instance: calm-otter-42", "agent instance: brave-lynx-17"),
        ("request cjld2cjxh0000qzrmn831i7rn", "request ckx9a8b3c0001z2xw7v5u6t4s"),
        ("Queue id: 5be1f0aa", "Queue id: c90417de"),
        ("branch-uuid=0d5c88f1-a2", "branch-uuid=f7419b3e-4c"),
        ("Workspace session: b1-77e04c", "Workspace session: b1-19fa3d"),
        ("Cursor token 4d0aa1c7", "Cursor token e2f95b08"),
    ],
)
def test_ids_of_other_shapes_are_ids(tmp_path: Path, had: str, got: str) -> None:
    """Short hexadecimal numbers, random numbers, pairs of digits, words with a number.

    The name right before the value counts, not the state word before that.
    """
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert causes(verdict) == ["random_id"]


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("HEAD is now at 5be1f0aa", "HEAD is now at c90417de"),
        ("Step id: 4", "Step id: 5"),
        ("Tokens left: 48210", "Tokens left: 47113"),
        ("Queue: 12 jobs", "Queue: 15 jobs"),
    ],
)
def test_a_commit_and_a_count_are_state(tmp_path: Path, had: str, got: str) -> None:
    """A value that is not random, or that no name of an id stands right before."""
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert causes(verdict) == ["path_or_state"]


def test_an_id_in_other_digits_is_an_id(tmp_path: Path) -> None:
    """Digits of another script are digits."""
    systems = [f"{RULES}\nSession {value}\n{MORE}" for value in ("٤٥٦٧٨٩١٢٣٤", "٩٨٧٦٥٤٣٢١٠")]

    assert causes(system_verdicts(tmp_path, *systems)[1]) == ["random_id"]


def test_an_id_that_happens_to_have_no_digit_is_an_id(tmp_path: Path) -> None:
    """Nor does it change what the other ids at its place are."""
    ids = ["call_9vXydQ9Fk6tBxcyGwREZ", "call_ITqYIoDp7BgUrCYOL3WT", "call_NRKnMcHitOhXWeijYBUG"]
    sent = [f"{RULES}\n{value}\n{MORE}" for value in ids]

    assert [causes(verdict) for verdict in system_verdicts(tmp_path, *sent)[1:]] == [
        ["random_id"],
        ["random_id"],
    ]


@pytest.mark.parametrize("repeats", [2, 40])
def test_causes_between_repeated_sentences_are_all_found(tmp_path: Path, repeats: int) -> None:
    """The sentence around the values repeats: each value is aligned with its own."""
    again = POLITELY * repeats
    systems = [
        f"{again}Now 2026-03-04 10:{minute}:00. {again}Request id {key}. {again}cwd: /home/{who}/src. {again}"
        for minute, key, who in [("01", "9f86d081884c", "anna"), ("17", "60303ae22b99", "boris")]
    ]

    verdict = system_verdicts(tmp_path, *systems)[1]

    assert causes(verdict) == ["clock", "random_id", "path_or_state"]
    assert [cause["got"] for cause in verdict["causes"]] == [
        "2026-03-04 10:17:00.", "60303ae22b99.", "/home/boris/src.",
    ]  # fmt: skip


def test_white_space_behind_repeated_sentences_is_found(tmp_path: Path) -> None:
    """The blank that is doubled stands between two equal sentences, behind a clock."""
    systems = [
        f"{POLITELY * 40}Now 10:{minute}. {POLITELY * 20}{blank}{POLITELY * 20}"
        for minute, blank in [("01", ""), ("17", " ")]
    ]

    assert causes(system_verdicts(tmp_path, *systems)[1]) == ["clock", "whitespace"]


def test_values_in_one_sentence_are_told_apart(tmp_path: Path) -> None:
    """A clock, an id and a path with few words between them are three causes."""
    systems = [
        f"{RULES} The time is 10:{minute}, session {key}, in /tmp/{key}/work. {MORE}"
        for minute, key in [("01", "9f86d081884c"), ("42", "60303ae22b99")]
    ]

    verdict = system_verdicts(tmp_path, *systems)[1]

    assert causes(verdict) == ["clock", "random_id", "path_or_state"]
    assert [cause["had"] for cause in verdict["causes"]] == [
        "10:01", "9f86d081884c", "/tmp/9f86d081884c/work.",
    ]  # fmt: skip


NEIGHBOURS = [
    ("Current time: {clock}\n\nnonce: {id}", "clock random_id"),
    ("now={clock} session={id}", "clock random_id"),
    ("session={id} now=2026-11-28 {clock}", "random_id clock"),
    ("{id} 2026-11-28T{clock}Z", "random_id clock"),
    ("[{id}] {clock}", "random_id clock"),
    ("<time>{clock}</time><id>{id}</id>", "clock random_id"),
    ("Trace {id}, 28.11.2026 {clock}", "random_id clock"),
    ("Date: Sat, 28 Nov 2026 {clock} GMT\ncwd: /tmp/run-{id}/x", "clock path_or_state"),
]


@pytest.mark.parametrize("number", [2, 8])
@pytest.mark.parametrize(("line", "expected"), NEIGHBOURS)
def test_values_side_by_side_are_two_causes(
    tmp_path: Path, line: str, expected: str, number: int
) -> None:
    """A clock and an id with a few equal characters between them: each has its name and its quote."""
    ids = [f"req_{md5(bytes([at])).hexdigest()[:20]}" for at in range(number)]
    texts = [line.format(clock=f"1{at}:2{at}:4{9 - at}", id=ids[at]) for at in range(number)]

    made = system_verdicts(tmp_path, *(f"{RULES}\n\n{text}\n\n{MORE}" for text in texts))[1:]

    assert {" ".join(causes(verdict)) for verdict in made} == {expected}
    quoted = [item["got"] for item in made[-1]["causes"]]
    assert any(ids[-1][4:] in text for text in quoted)
    assert not any(ids[-1][4:] in text and f"2{number - 1}:4" in text for text in quoted)


@pytest.mark.parametrize(
    ("had", "got", "expected"),
    [
        ("Branch: trunk\nToday is Monday, 2 March.", "Branch: spike/io\nToday is Friday, 6 March.",
         "path_or_state clock"),
        ("Trace 5be1f0aa\nOn Monday, 2 March", "Trace c90417de\nOn Friday, 6 March", "random_id clock"),
        ("Span 5be1f0aa11cc, git branch: trunk", "Span c90417de52bb, git branch: spike/io",
         "random_id path_or_state"),
        ("ts=1790000000\nRun calm-heron-3307", "ts=1790000061\nRun bold-tapir-9154", "clock random_id"),
    ],
)  # fmt: skip
def test_labelled_values_side_by_side_are_two_causes(
    tmp_path: Path, had: str, got: str, expected: str
) -> None:
    """The equal text between two values is shorter than they are; it begins a line or names a value."""
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert " ".join(causes(verdict)) == expected


def test_a_serial_id_beside_a_clock_is_an_id(tmp_path: Path) -> None:
    """It grows with the requests as the clock does; the word before it says what it is."""
    ids = [1178899001122334455 + 7_000_000_000 * at * at for at in range(1, 9)]

    made = system_verdicts(
        tmp_path,
        *(f"{RULES}\nnow=10:0{at}:1{at} request={item}\n{MORE}" for at, item in enumerate(ids)),
    )[1:]

    assert {" ".join(causes(verdict)) for verdict in made} == {"clock random_id"}


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("$ git status --short\n M lib/parse.c\n?? todo.txt", "$ git status --short\n M lib/lex.c"),
        ("git status: On branch dev\n M Makefile", "git status: On branch dev\n M Makefile\nA  ci.yml"),
        ("git status\n?? notes.md\n?? plan.md", "git status\n?? plan.md"),
        ("git status\nM  setup.cfg", "git status\n D setup.cfg\n?? a b.md\nR  old.py -> new.py"),
        ("Plan\n☐ Read the log\n☐ Write a test", "Plan\n☑ Read the log\n☐ Write a test"),
        ("Plan\n- [x] Read the log", "Plan\n- [x] Read the log\n- [ ] Write a test"),
        ("<files>\nmain.rs\nlib.rs\n</files>", "<files>\nmain.rs\ncache.rs\nlib.rs\n</files>"),
        ("Directory listing:\n- src/\n- README.md", "Directory listing:\n- src/\n- docs/\n- README.md"),
    ],
)  # fmt: skip
def test_a_state_block_may_change_its_number_of_lines(tmp_path: Path, had: str, got: str) -> None:
    """Files of a version control system, check boxes, a listing: causes beside them stay in sight."""
    systems = [
        f"Now 2026-03-04 10:{minute}.\n{RULES}\n\n{state}\n\n{MORE}\nRequest id {key}"
        for minute, state, key in [("01", had, "9f86d081884c"), ("17", got, "60303ae22b99")]
    ]

    made = causes(system_verdicts(tmp_path, *systems)[1])

    assert list(dict.fromkeys(made)) == ["clock", "path_or_state", "random_id"]


@pytest.mark.parametrize(
    ("had", "got"),
    [
        ("Sort the fruit.\nA pear\nA fig", "Sort the fruit.\nA pear\nA plum\nA fig"),
        ("Steps:\n- read\n- think", "Steps:\n- read\n- write\n- think"),
        ("Answer in French or Dutch.", "Answer in French, in Greek or in Dutch."),
        ("Stay on this branch.", "Stay on this branch. Never push it by force."),
    ],
)
def test_other_lists_are_content(tmp_path: Path, had: str, got: str) -> None:
    """A list of words that has another item, or one more sentence, is what the author wrote."""
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert causes(verdict) == ["new_content"]


@pytest.mark.parametrize("mark", ["-", "├─", "- ", "a-", "a/", "[ ", "?"])
def test_a_line_of_marks_is_read_in_linear_time(mark: str) -> None:
    """A ruler or a frame as long as the text that is kept around a value."""
    lines = [mark * 300, f"{mark * 300}!"]

    assert not are_state_lines(lines, "")
    assert not are_listed_files(lines, "\n".join(lines), "\n".join(lines))
