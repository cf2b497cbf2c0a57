"""The page of rules is the table."""

from pathlib import Path

from autopar.rules.document import HEAD, page

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def test_the_page_of_rules_lists_every_row_as_it_is() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    for line in page({}).removeprefix(HEAD).splitlines():
        assert line.rsplit("|", 2)[0] in text, f"{line} is not in {PAGE.name}: make rules"
