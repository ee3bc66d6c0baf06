"""Sizes of a compressed cache: bytes, text with a unit, or a ratio to the cache of softmax attention."""

import math
import re

from dofla.display import size as shown
from dofla.errors import DoflaError

RATIO = 16.0
"""Default: softmax bytes per compressed byte, at the context that the cache is for."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MOST = 2**50


def parse_size(size: int | str) -> int:
    """Bytes of ``"1.5MiB"``, ``"800 KiB"``, ``"2 MB"`` or an int. DoflaError for another form, an unknown unit,
    nothing, or more than a PiB."""
    count = size if isinstance(size, int) and not isinstance(size, bool) else None
    if isinstance(size, str) and (found := re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)):
        unit = _UNITS.get(found[2].lower())
        count = None if unit is None else round(min(float(found[1]) * unit, 2.0 * _MOST))
    if count is None:
        raise DoflaError(f"size is {size!r}: give bytes with a unit, as 1.5MiB or 800KiB, or an integer of bytes")
    if not 0 < count <= _MOST:
        raise DoflaError(f"size is {size!r}: give more than nothing, and {shown(_MOST)} at most")
    return count


def size_or_ratio(size: int | str | None, ratio: float | None, cache: int | None, where: str) -> int:
    """Bytes of the compressed cache: ``size``, or ``cache / ratio``; a ratio of :data:`RATIO` if neither is given.

    ``cache`` is bytes of the softmax cache, None where the model states no number of positions; ``where`` names it.
    DoflaError if both are given, for a ratio that is not above 1, or one of no ``cache``.
    """
    if size is not None and ratio is not None:
        raise DoflaError(f"size is {size!r} and ratio is {ratio!r}: give one of them")
    if size is not None:
        return parse_size(size)
    ratio = RATIO if ratio is None else ratio
    if not isinstance(ratio, (int, float)) or not 1 < ratio < math.inf:
        raise DoflaError(f"ratio is {ratio!r}: give softmax bytes per compressed byte, above 1, as {RATIO:g}")
    if cache is None:
        raise DoflaError(f"{where} states no number of positions: give context, or size instead of a ratio")
    return max(round(cache / ratio), 1)


def in_bytes(count: int) -> str:
    """A size that can be given back, with a readable one: ``12672 bytes (12.4 KiB)``."""
    return f"{count} bytes" + (f" ({shown(count)})" if count >= 1024 else "")
