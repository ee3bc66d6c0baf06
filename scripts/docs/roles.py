"""Hook of mkdocs: the roles of docstrings, ``:func:`dofla.load```, become links where the site has what they name."""

from __future__ import annotations

import re

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([\w.]+)</code>")
_INDICES = re.compile(r'<autoref [^>]*?identifier="([^"]* [^"]*)"[^>]*>(.*?)</autoref>')
"""A shape such as ``[layer][KV head]``, which Markdown takes for a link; no name has a space."""


def on_page_content(content: str, **_) -> str:
    content = _INDICES.sub(r"[\2][\1]", content)
    return _ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', content)
