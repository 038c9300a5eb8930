"""The quality of a log in the JSON of lint."""

import json
from pathlib import Path

from ramify.analysis.linting import lint


def test_quality_has_counts_by_reason(tmp_path: Path) -> None:
    """Bad lines, skipped rows and formats are counts by name, as JSON can hold them."""
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"model": "m", "prompt": "a"}\n{\n'
        '{"request": {"model": "m", "prompt": "a"}, "status_code": 500}\n{"x": 1}\n'
    )

    quality = json.loads(json.dumps(lint(path).quality))

    assert quality["bad_lines"] == [[str(path), 2]]
    assert quality["skipped"] == {"failed attempt": 1, "row of no known format": 1}
    assert quality["formats"] == {"bodies": 2}
