"""The page of supported models says what the tests expect."""

from models_page import PAGE, page


def test_the_page_is_what_the_expectations_make():
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/families/models_page.py writes it anew"
