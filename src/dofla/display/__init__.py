"""Display of results and of progress: tables as text and as HTML, and progress bars."""

from dofla.display.progress import Bar, reporting, showing
from dofla.display.tables import Part, Result, as_html, as_text, factor, figure, percent, size, table

__all__ = [
    "Bar",
    "Part",
    "Result",
    "as_html",
    "as_text",
    "factor",
    "figure",
    "percent",
    "reporting",
    "showing",
    "size",
    "table",
]
