"""One HTML file from the page's data: template, styles and scripts stand inside it, and nothing is fetched."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dofla.errors import DoflaError
from dofla.storage.files import replacing

LIMIT = 5_000_000
"""Bytes of a page at most."""

_PARTS = {
    "styles": ("theme", "base", "answer", "charts", "plan", "layers", "attention", "texts", "repeat"),
    "scripts": (
        *("tools", "colors", "scales", "charts", "heat", "maps", "plan"),
        *("answer", "layers", "attention", "texts", "speed", "compared", "sizes", "repeat", "page"),
    ),
}
"""Files that a page consists of, in order; a script may use what those before it define."""
_ENDINGS = {"styles": "css", "scripts": "js"}


def write_page(path: str | Path, data: dict[str, Any]) -> Path:
    """Write the page, replacing what was there.

    Where attention maps would make it larger than :data:`LIMIT`, those of the students that lost most are left out.

    Raises:
        DoflaError: it is too large without them, too, or the file cannot be written.
    """
    path = Path(path)
    html = page(data)
    with_maps = [x for run in data["runs"] for x in run["students"] if x["maps"]]
    for student in sorted(with_maps, key=lambda x: math.inf if x["lost"] is None else x["lost"], reverse=True):
        if len(html) <= LIMIT:
            break
        student["maps"] = None
        student["left_out"] = student["left_out"] | {"maps": "the page would be too large: report fewer runs at once"}
        html = page(data)
    if len(html) > LIMIT:
        raise DoflaError(f"the page would take {len(html)} bytes, {LIMIT} are allowed: report fewer runs at once")
    with replacing(path) as partial:
        partial.write_bytes(html)
    return path


def page(data: dict[str, Any]) -> bytes:
    """The page as UTF-8."""
    assets = PackageLoader("dofla.report", "assets")
    environment = Environment(
        loader=assets,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # "<" could end the script that holds the data, and the last two are line ends to a script, but not to JSON.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        kind: [Markup(assets.get_source(environment, f"{name}.{_ENDINGS[kind]}")[0]) for name in names]
        for kind, names in _PARTS.items()
    }
    return environment.get_template("page.html.j2").render(data=data, json=Markup(text), **parts).encode("utf-8")
