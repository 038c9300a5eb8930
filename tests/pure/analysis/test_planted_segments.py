"""The readers split planted logs into the segments of the generator's own splitting."""

from pathlib import Path

import pytest

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from tests.pure.analysis.planted_bodies import pieces_of
from tests.pure.analysis.planted_formats import FORMATS, planted_log, write_log


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_segments_are_those_of_the_contract(tmp_path: Path, name: str) -> None:
    """Lines, paths, kinds and texts agree; every bad line is reported, and no other."""
    log = planted_log(3, name, num_requests=60)
    written = write_log(log, name, tmp_path / "log.jsonl")
    quality = ReadQuality()

    requests = list(read_log(written.path, quality=quality))

    assert [request.line for request in requests] == list(written.lines)
    assert [line for _, line in quality.bad_lines] == list(written.bad_lines)
    for planted, request in zip(log.requests, requests, strict=True):
        expected = pieces_of(planted.render(list(planted.changes))[0])
        assert [item.path for item in request.segments] == [item.path for item in expected]
        assert [item.kind for item in request.segments] == [item.kind for item in expected]
        for segment, piece in zip(request.segments, expected, strict=True):
            if piece.chars is not None:
                assert segment.text == piece.chars
