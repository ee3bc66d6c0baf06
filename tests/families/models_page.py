"""The page of supported models, made of what is expected of each family: ``python tests/families/models_page.py``
writes it."""

from pathlib import Path

from expectations import FAMILIES, NOT_TESTED, REFUSED, REMARKS, SUPPORTED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# Supported models

<!-- Written by tests/families/models_page.py -->

`dofla check MODEL` says of any model whether it is supported, from its `config.json` alone
([how](guides/compress.md#is-it-supported)). There is no list of families in the code: dofla runs the model once on a
few tokens and sees which modules call for attention. This page is what tests find of every family of causal language
models in transformers, and of those that take pictures as well, on text: {supported} supported, {refused} refused,
{others} not tested.

Of each family a tiny model with random weights is built from its config class. *Supported* means: with all tokens held
the compressed model says what the original says; a text read in pieces, or token by token
(`prefill="sequential"`), and one with padding on its left give what one pass gives, to 10⁻⁹ in float64 or as far as the
original does; a compressed model saved and opened again is the same; `dofla.restore` gives the original back bit for
bit; and `generate` writes the same with and without a cache (`pytest -m long tests/families`).
Names are those of `model_type` in `config.json`.
"""
_REFUSED = """
## Refused

`dofla.compress` raises an error of one line before anything is changed. Where the reason names a layer,
the others can be compressed: `keep_softmax` (`--set keep_softmax=NAME`) leaves that layer as it is.

| reason | families |
|---|---|
"""
_OTHERS = """
## Not tested

| reason | families |
|---|---|
"""


def page() -> str:
    """The text of the page."""
    counts = {"supported": len(SUPPORTED), "refused": len(REFUSED), "others": len(NOT_TESTED)}
    parts = [_HEAD.format(**counts), "\n## Supported\n\n", _names(set(SUPPORTED) - set(REMARKS)), "\n"]
    parts += ["\n| and | families |\n|---|---|\n", *_rows(REMARKS)]
    parts += [_REFUSED, *_rows(REFUSED), _OTHERS, *_rows(NOT_TESTED)]
    return "".join(parts)


def _rows(reasons: dict[str, str]) -> list[str]:
    by_reason: dict[str, set[str]] = {}
    for family, reason in reasons.items():
        by_reason.setdefault(reason, set()).add(family)
    return [f"| {reason} | {_names(families)} |\n" for reason, families in by_reason.items()]


def _names(families: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(families & set(FAMILIES)))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
