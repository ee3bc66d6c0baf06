"""One HTML file, which loads nothing: sections with tables and charts, and the runtime that draws the charts."""

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import dofla
from dofla.display import Part, as_html
from dofla.errors import DoflaError
from dofla.report.charts import Chart, alt
from dofla.storage.extras import extra
from dofla.storage.files import replacing

LIMIT = 5_000_000
"""Bytes of a page at most."""

vl_convert: Any = extra("vl_convert", "report", "a report")


@dataclass
class Section:
    """The part of the page on some folders.

    Attributes:
        evaluated: a line on each folder: what was evaluated, and how.
        samples: for each prompt its text, and who continued it how.
        commands: to go on with.
        recipes: folder and recipe of each run.
    """

    title: str
    verdict: str
    evaluated: list[str]
    parts: list[Part]
    charts: list[Chart]
    samples: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    recipes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def tables(self) -> Markup:
        """The parts as HTML."""
        return Markup(as_html(self.parts))


def write_page(path: str | Path, sections: Sequence[Section]) -> Path:
    """Write the page, replacing what was there; DoflaError if it is larger than :data:`LIMIT`, or cannot be written."""
    path = Path(path)
    environment = Environment(
        loader=PackageLoader("dofla.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # A specification stands inside a script, which "<" could end.
    environment.filters["spec"] = lambda spec: Markup(json.dumps(spec, allow_nan=False).replace("<", "\\u003c"))
    page = environment.get_template("page.html.j2").render(
        title=", ".join(dict.fromkeys(section.title for section in sections)),
        sections=sections,
        version=dofla.__version__,
        today=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        runtime=Markup(vl_convert.javascript_bundle(vl_version=alt.SCHEMA_VERSION.lstrip("v").rpartition(".")[0])),
    )
    html = page.encode("utf-8")
    if len(html) > LIMIT:
        raise DoflaError(f"the page would take {len(html)} bytes, {LIMIT} are allowed: report fewer runs at once")
    with replacing(path) as partial:
        partial.write_bytes(html)
    return path
