"""`docs/api.md` says of every field of a request what becomes of it, and of every format of calls."""

import re
from pathlib import Path

import msgspec
import pytest

from ramify.server.anthropic.endpoints import FIELDS as MESSAGE_FIELDS
from ramify.server.anthropic.protocol import MessageRequest
from ramify.server.errors import ApiError
from ramify.server.model_dialects.table import CALL_FORMATS
from ramify.server.ollama.endpoints import FIELDS as OLLAMA_FIELDS
from ramify.server.ollama.options import KNOWN, OTHER_SAMPLERS, SILENT
from ramify.server.ollama.protocol import GenerateRequest, OllamaChatRequest
from ramify.server.openai.protocol import ChatRequest, CompletionRequest
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from ramify.server.request_fields.unsupported_fields import UnsupportedFields

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", re.MULTILINE)
APIS: dict[str, tuple[type[msgspec.Struct], UnsupportedFields]] = {
    "Chat completions": (ChatRequest, CHAT_FIELDS),
    "Completions": (CompletionRequest, COMPLETION_FIELDS),
    "Responses": (ResponsesRequest, RESPONSES_FIELDS),
    "Messages": (MessageRequest, MESSAGE_FIELDS),
    "Ollama chat": (OllamaChatRequest, OLLAMA_FIELDS),
    "Ollama generate": (GenerateRequest, OLLAMA_FIELDS),
}


def section(title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match[1]


# Section → that with the fields which several of them have.
SHARED = {
    "Chat completions": "Both completion endpoints",
    "Completions": "Both completion endpoints",
    "Ollama chat": "Ollama",
    "Ollama generate": "Ollama",
}


def documented(title: str) -> list[tuple[str, str]]:
    """Each field with what becomes of it, from the first table of an API's section.

    The completion endpoints, and those of Ollama, have a table of the fields of both.
    """
    shared = section(SHARED[title]) if title in SHARED else ""
    tables = [shared, section(title).partition("|\n\n")[0]]
    return [
        (name, treatment)
        for names, treatment in ROW.findall("\n".join(tables))
        for name in re.findall(r"`(\w+)`", names)
    ]


@pytest.mark.parametrize("title", APIS)
def test_every_field_has_one_row(title: str) -> None:
    """Fields of the request's type, and those that are refused or ignored beside them; no others."""
    kind, unsupported = APIS[title]
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    names = [name for name, _ in documented(title)]

    assert len(names) == len(set(names))
    assert set(names) == fields | set(unsupported.refused) | unsupported.ignored


@pytest.mark.parametrize("title", APIS)
def test_what_becomes_of_a_field_is_right(title: str) -> None:
    """Fields outside of the type are refused or ignored as the table says; the words are four."""
    kind, unsupported = APIS[title]
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}

    for name, treatment in documented(title):
        assert treatment in ("honoured", "mapped", "ignored", "refused"), name
        if name not in fields:
            assert treatment == ("refused" if name in unsupported.refused else "ignored"), name


def test_every_option_of_ollama_has_one_row() -> None:
    """Those that are honoured or mapped are fields of `ModelOptions`."""
    rows = documented("Ollama options")

    assert sorted(name for name, _ in rows) == sorted(KNOWN | SILENT | OTHER_SAMPLERS.keys())
    served = {name for name, treatment in rows if treatment != "ignored"}
    assert served == KNOWN - {"num_ctx"}


def test_every_format_of_tool_calls_has_a_row() -> None:
    """The first column of the table has the names of all formats, and no others."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section("Formats of tool calls"), re.MULTILINE)

    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(names) == sorted(row.name for row in CALL_FORMATS)


def test_of_several_refused_fields_the_first_of_the_request_is_named() -> None:
    """However texts are hashed in this process."""
    for names in (("system", "suffix", "functions"), ("functions", "system", "suffix")):
        fields = {name: msgspec.Raw(b'"x"') for name in names}

        with pytest.raises(ApiError) as caught:
            CHAT_FIELDS.unknown(fields)

        assert caught.value.param == names[0]
