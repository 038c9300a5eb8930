"""What a verdict quotes, and what it must not prove: clauses of the JSON contract on tiny logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ramify.analysis.compare.quoting import mask_secrets, quote
from tests.pure.analysis.contract_log import (
    MORE,
    RULES,
    Json,
    causes,
    chat,
    message,
    system_verdicts,
    verdicts,
)


def _second_verdict(tmp_path: Path, *systems: str) -> Json:
    return system_verdicts(tmp_path, *systems)[1]


def test_the_blanks_of_a_new_document_are_not_whitespace(tmp_path: Path) -> None:
    """White space within content that legitimately differs convicts nobody."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\nDocument: The treaty  of 1648\tended a war. \n{MORE}",
        f"{RULES}\nDocument: Whales are mammals.\n{MORE}",
    )
    assert causes(verdict) == ["new_content"]


def test_a_cut_prompt_is_not_whitespace(tmp_path: Path) -> None:
    """Text that is missing at the end is no change of white space."""
    verdict = _second_verdict(tmp_path, f"{RULES}\n\nEnd of it.  {MORE}", RULES)
    assert "whitespace" not in causes(verdict)


def test_white_space_behind_an_id_is_quoted_where_it_is(tmp_path: Path) -> None:
    """Causes stand in the order of the prompt, each with the text at its own place."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\nSession: 8c6f3fd2-2e66-4a75-9f43-0e6f6d8fd7e1\n{MORE} Be  kind.",
        f"{RULES}\nSession: 1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed\n{MORE} Be kind.",
    )
    assert causes(verdict) == ["random_id", "whitespace"]
    assert "Be  kind" in verdict["causes"][1]["had"]
    assert "Be kind" in verdict["causes"][1]["got"]


def test_white_space_at_the_end_is_found_behind_a_clock(tmp_path: Path) -> None:
    """A line end that one prompt lacks is white space, whatever else differs."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\nNow: 2026-03-01T10:00:00Z\n{MORE}\n",
        f"{RULES}\nNow: 2026-03-01T10:07:13Z\n{MORE}",
    )
    assert causes(verdict) == ["clock", "whitespace"]


def test_the_whole_password_is_masked(tmp_path: Path) -> None:
    """No part of a secret is quoted, whatever its characters."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\npassword=hunter2secretA\n{MORE}",
        f"{RULES}\npassword=Tr0ub4dor&3xyz\n{MORE}",
    )
    assert "3xyz" not in json.dumps(verdict)


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY=",
        "GITHUB_TOKEN=",
        "AZURE_STORAGE_ACCOUNT_KEY: ",
        "dbPassword: ",
        '{"clientSecret": "',
        "API key: ",
    ],
)
def test_a_secret_is_known_by_the_words_of_its_name(tmp_path: Path, name: str) -> None:
    """Names of environment variables and of fields, whatever stands before and behind the word."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\n{name}wJq4rX2tnFe91\n{MORE}",
        f"{RULES}\n{name}bPx7RfiCYk05z\n{MORE}",
    )
    text = json.dumps(verdict)
    assert "tnFe91" not in text
    assert "CYk05z" not in text
    assert "***" in verdict["divergence"]["got"]


ISSUED = (  # split, so that no scanner takes them for real ones
    "https://hooks.slack." + "com/services/T0123ABCD/B0123ABCD/abcdefghijklmnopqrstuvwx",
    "https://discord." + "com/api/webhooks/123456789012345678/abcdefghijklmnop",
    "npm" + "_abcdefghijklmnopqrstuvwxyz0123456789",
    "SG" + ".abcdefghijklmnopqrstuv.abcdefghijklmnopqrstuvwxyz0123456789",
    "SK" + "0123456789abcdef0123456789abcdef",
    "110201543" + ":AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw1",
    "4111 1111 1111 1111",
    "5555-5555-5555-4444",
    "378282246310005",
)


@pytest.mark.parametrize("secret", ISSUED)
def test_secrets_are_known_by_their_issuer(secret: str) -> None:
    """Webhooks, tokens and card numbers: masked, and no part of one quoted wherever a quote ends."""
    text = f"{RULES}\nUse {secret} for it.\n{MORE}"
    start = text.index(secret)

    masked = mask_secrets(text)

    assert secret not in masked and "***" in masked
    for end in range(start + 1, start + len(secret) + 1):
        assert secret.removeprefix("https://")[:8] not in quote(text, start - 4, end)


@pytest.mark.parametrize(
    "text", ["1764000000250", "order 4111111111111112", "2026-11-27 10 00 00", "v 1234567890123456"]
)
def test_numbers_that_are_no_cards_are_quoted(text: str) -> None:
    """Times, ids and orders: the check digit or the issuer is wrong."""
    assert mask_secrets(text) == text


@pytest.mark.parametrize("text", ["The secretary: John", "max_tokens: 512", "token: 42"])
def test_words_that_name_no_secret_are_quoted(text: str) -> None:
    assert mask_secrets(text) == text


def test_another_image_shares_no_token(tmp_path: Path) -> None:
    """What is reusable ends at an image that differs, where the divergence is."""
    bodies = [
        chat(
            message("system", RULES),
            message(
                "user",
                [
                    {"type": "text", "text": "What is in the picture of the garden?"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                ],
            ),
        )
        for data in ("iVBORw0KGgoAAAA", "iVBORw0KGgoBBBB")
    ]

    verdict = verdicts(tmp_path, *bodies)[1]

    assert verdict["divergence"]["segment"] == "messages[1].content[1]"
    assert verdict["divergence"]["char"] == 0
    assert verdict["tokens"]["reusable"] == verdict["divergence"]["token"]


def test_white_space_behind_a_last_value_is_found(tmp_path: Path) -> None:
    """The id is the last word of both prompts; one ends with a line end."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\n[conversation b8695602-4a20-4d71-8554-e0f0987f3241] \n",
        f"{RULES}\n[conversation 1316f600-f87e-42f6-a5db-23866ed55460]",
    )
    assert causes(verdict) == ["random_id", "whitespace"]


def test_white_space_beside_a_checked_item_is_found(tmp_path: Path) -> None:
    """A mark within brackets takes no word away from the text that is compared."""
    verdict = _second_verdict(
        tmp_path,
        f"{RULES}\n<todo>\n[ ] Read the mail.\n[ ] Write an answer.\n</todo>",
        f"{RULES.replace('. ', '.  ')}\n<todo>\n[x] Read the mail.\n[ ] Write an answer.\n</todo>",
    )
    assert causes(verdict) == ["whitespace", "path_or_state"]
