"""docs/options.md is what the code says."""

from dataclasses import fields

from scripts.options_table import PAGE, engine_sections, page, serve_parameters


def test_every_engine_option_has_help() -> None:
    """Each field of each section carries the text that the command line and the table show."""
    missing = [
        option.name
        for _, section in engine_sections()
        for option in fields(section)
        if not option.metadata.get("help")
    ]

    assert not missing


def test_every_flag_of_serve_has_help() -> None:
    """Each flag says what it is for."""
    missing = [name for name, parameter in serve_parameters().items() if not parameter.help]

    assert set(missing) <= {"help"}


def test_the_table_is_up_to_date() -> None:
    """`make options` changes nothing."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make options`"
