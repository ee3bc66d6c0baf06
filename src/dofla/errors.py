"""The one exception that stands for "the input is wrong", as opposed to "dofla is wrong"."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class DoflaError(ValueError):
    """Bad input. The message is one line naming the thing, the value and the way out; the CLI prints it and exits 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # a name in it may have several


@contextmanager
def about(what: Path | str) -> Iterator[None]:
    """Within the block what is wrong is wrong with this file, or whatever else is named."""
    try:
        yield
    except DoflaError as error:
        raise DoflaError(f"{what}: {error}") from error


@contextmanager
def malformed(what: str, way_out: str) -> Iterator[None]:
    """Within the block, where plain data is read, what is missing in it or of another kind is a DoflaError: ``what`` is
    wrong, why, and the ``way_out``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        why = str(error) if isinstance(error, DoflaError) else f"{type(error).__name__}: {error}"
        raise DoflaError(f"{what} ({why}): {way_out}") from error


def is_integer(value: object) -> bool:
    """True if ``value`` is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_numbers(**numbers: int) -> None:
    """DoflaError naming the first that is no integer, or below 1."""
    for name, value in numbers.items():
        if not is_integer(value):
            raise DoflaError(f"{name} is {value!r}: give an integer, 1 or more")
        if value < 1:
            raise DoflaError(f"{name} is {value}: give 1 or more")


def check_choice(what: str, value: str, known: Iterable[str]) -> None:
    """DoflaError listing what is ``known`` unless ``value`` is one of it."""
    if value not in known:
        raise DoflaError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")


def first_line(error: Exception) -> str:
    """The first line of what an error of other software says, or its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def ran_out_of_memory(error: Exception) -> bool:
    """True of the errors of Python and torch for too little memory, on a CPU or a GPU."""
    words = f"{type(error).__name__}: {error}"
    return any(x in words for x in ("MemoryError", "OutOfMemoryError", "can't allocate memory"))
