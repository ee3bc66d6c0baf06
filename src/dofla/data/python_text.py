"""Prose and source code that come with every Python: the documentation of the language, and modules of its library."""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from inspect import getsource
from itertools import chain, zip_longest

MODULES = "statistics", "argparse", "textwrap", "random", "calendar", "csv", "configparser", "difflib"
EXCERPT = 4096
"""Characters of a document."""


def python_text() -> list[str]:
    """Beginnings of documents of both kinds in turns, as far as this Python has them."""
    both = zip_longest(_topics(), _sources(), fillvalue="")
    return [text[:EXCERPT] for text in chain(*both) if text]


def _topics() -> Iterator[str]:
    """Help on the concepts of the language, those first of which there is most to say."""
    with suppress(ImportError):  # some systems leave it out
        yield from sorted(import_module("pydoc_data.topics").topics.values(), key=len, reverse=True)[: len(MODULES)]


def _sources() -> Iterator[str]:
    for name in MODULES:
        with suppress(ImportError, OSError):  # it is installed without its source
            yield getsource(import_module(name))
