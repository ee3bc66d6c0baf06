"""One of everything that dofla reads, all in one folder."""

from pathlib import Path

import pytest
from inputs import make


@pytest.fixture(scope="session")
def made(tiny, tmp_path_factory) -> Path:
    """The folder; what a test changes there it puts back."""
    folder = tmp_path_factory.mktemp("inputs")
    make(folder, tiny)
    return folder
