"""The text that a custom tool is called with, out of the JSON that the model writes: `{"input": "…"}`."""

from __future__ import annotations

import json
import re

from ramify.server.answers.partial_json import partial_object

BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
MAX_BEGIN_CHARS = 512  # before the text; longer white space is decoded at the end
PLAIN = re.compile(r'[^"\\]+')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB]")
PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


class CustomInputDecoder:
    """Decodes the string while it is written; `finish` has the rest.

    Arguments of another form are the input as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = self._is_stuck = False

    def feed(self, arguments: str) -> str:
        """Append text of the arguments; returns new text of the input."""
        if self._is_stuck:
            return ""
        self._held += arguments
        if not self._is_inside:
            begin = BEGIN.match(self._held, 0, MAX_BEGIN_CHARS)
            if begin is None:
                self._is_stuck = len(self._held) >= MAX_BEGIN_CHARS
                return ""
            self._is_inside, self._held = True, self._held[begin.end() :]
        return self._decode()

    def _decode(self) -> str:
        """Decode what is held as far as it is certain."""
        texts, place, held = list[str](), 0, self._held
        while place < len(held):
            if plain := PLAIN.match(held, place):
                texts.append(plain[0])
                place = plain.end()
                continue
            escape = ESCAPE.match(held, place)
            if escape is None:
                # the end of the string, an escape that is cut off, or none that JSON has
                self._is_stuck = not PARTIAL_ESCAPE.fullmatch(held, place)
                break
            end = escape.end()
            if HIGH_SURROGATE.match(held, place):
                if end == len(held) or PARTIAL_ESCAPE.fullmatch(held, end):
                    break  # the other half may follow
                second = ESCAPE.match(held, end)
                end = end if second is None else second.end()
            texts.append(_unescape(held[place:end]))
            place = end
        self._held = held[place:]
        return "".join(texts)

    def finish(self, arguments: str) -> str:
        """The rest of the input, after `feed` has got all of `arguments`."""
        if self._is_inside:
            return ""
        member = partial_object(arguments).get("input")
        return _replaced(member) if isinstance(member, str) else arguments


def custom_input(arguments: str) -> str:
    """The whole input, from the whole arguments."""
    decoder = CustomInputDecoder()
    return decoder.feed(arguments) + decoder.finish(arguments)


def _unescape(text: str) -> str:
    return _replaced(json.loads(f'"{text}"'))


def _replaced(text: str) -> str:
    """The text with a replacement character for each surrogate without its other half."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
