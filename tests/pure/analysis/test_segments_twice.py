"""Bodies cut into segments by the analyser and by the planted logs' own implementation."""

import pytest

from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.records import TextForm
from tests.pure.analysis.planted_logs import make_log


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_two_implementations_cut_bodies_alike(api: str) -> None:
    """Paths are equal, and so are texts, but for settings and media, in which nothing is counted."""
    for request in make_log(7, num_requests=250, api=api).requests:
        body, pieces, _ = request.render(request.changes)

        (fields,) = parse_bodies(body)

        assert [item.path for item in fields.segments] == [piece.path for piece in pieces]
        for item, piece in zip(fields.segments, pieces, strict=True):
            assert str(item.kind) == piece.kind
            if piece.chars is not None:
                assert item.text == piece.chars
            elif piece.kind == "message":
                assert item.form is TextForm.MEDIA
