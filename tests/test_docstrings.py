"""Docstrings are sentences about a thing: they do not continue its name."""

import ast
from pathlib import Path

import dofla

FIRST_WORDS = {"Of", "That", "What", "Whether", "How", "As", "By", "Those"}


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Line and text of the docstrings of a module, of its definitions, and below assignments."""
    bodies = [getattr(node, "body", None) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    statements = [x for body in bodies if isinstance(body, list) for x in body if isinstance(x, ast.Expr)]
    constants = [x.value for x in statements if isinstance(x.value, ast.Constant)]
    return [(x.lineno, x.value) for x in constants if isinstance(x.value, str)]


def test_no_docstring_continues_the_name_of_its_object():
    root = Path(dofla.__file__).parent
    bad = [
        f"{path.relative_to(root)}:{line}: {text.split('.')[0][:60]}"
        for path in sorted(root.rglob("*.py"))
        for line, text in docstrings(path)
        if text.split(maxsplit=1)[0].rstrip(".,:") in FIRST_WORDS
    ]
    assert not bad, f"{len(bad)} docstrings begin with {', '.join(sorted(FIRST_WORDS))}:\n" + "\n".join(bad)
