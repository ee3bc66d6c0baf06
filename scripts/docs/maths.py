"""Hook of mkdocs: formulas become MathML, which browsers show by themselves, so that no script need be fetched."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_) -> str:
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match) -> str:
    tag, tex = match.groups()
    formula = convert(html.unescape(tex), display="block" if tag == "div" else "inline")
    if "\\" in formula:
        raise ValueError(f"a command that is not known was left as it stands: {tex}")
    return f'<{tag} class="formula">{formula}</{tag}>'
