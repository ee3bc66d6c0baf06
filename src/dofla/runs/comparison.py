"""The results of a run as tables: models down, figures across."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from dofla.display import Part, size, table

_COLUMNS = {
    "loss": ("loss", "next-token loss, nats per token"),
    "loss_increase": ("+loss", "increase over the original's loss"),
    "kl": ("KL", "KL divergence of the next-token distributions from the original's, nats"),
    "top1_agreement": ("top-1", "share of positions with the original's likeliest token"),
    "cosine": ("cosine", "similarity of embeddings to the original's"),
    "spearman": ("Spearman", "rank correlation of the similarities of pairs with the original's"),
    "attention_output_error": ("attention", "relative error of attention outputs, mean over layers"),
}
"""Titles of the columns, by figure, and what they say."""
_LONGEST = 300  # characters of a prompt that are shown

_FIGURE, _SPREAD, _SIZE = len("-0.000"), len("±0.00"), len("1000.0 KiB")


def model_row(row: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> Iterator[Part]:
    """A model of a run, as soon as it is known, from its row of the results and the names and seeds of all; the first
    with the header, and what its columns say."""
    first, several = row["name"] == names[0], len(seeds) > 1
    keys = [key for key in _COLUMNS if key in row]
    if first:
        yield ""
        yield from (": ".join(_COLUMNS[key]) for key in keys)
        yield "cache: bytes per sequence\n"
    shown = table("model", *(_COLUMNS[key][0] for key in keys), "cache", gap=1, show_header=first)
    # In columns as wide as for any other.
    widths = [_FIGURE + (_SPREAD if several and key == "loss_increase" else 0) for key in keys]
    for column, width in zip(shown.columns, (max(map(len, names)), *widths, _SIZE), strict=True):
        column.min_width = max(width, len(str(column.header)))
    cells = [
        f"{row[k]['mean']:.3f}" + (f"±{row[k]['spread']:.2f}" if several and k == "loss_increase" else "") for k in keys
    ]
    shown.add_row(row["name"], *cells, size(row["state_bytes"]))
    yield shown


def closing(results: dict[str, Any]) -> Iterator[Part | Text]:
    """The lines below several models of a run, and the texts that the best of them writes."""
    models = results["models"]
    if len(models) == 1:
        return
    if len(results["seeds"]) > 1:
        yield f"mean of {len(results['seeds'])} seeds ± half their range"
    best = min(models, key=lambda row: row.get("loss_increase", row["attention_output_error"])["mean"])
    yield from samples(best["name"], best["runs"][0].get("samples", []))


def samples(name: str, written: Sequence[dict[str, Any]]) -> Iterator[Part | Text]:
    """Prompts, and below each what the original and the model of this name write."""
    for sample in written:
        yield ""
        yield Text.assemble(("prompt: ", "bold"), excerpt(sample["prompt"]))
        for writer, text in (("original", sample["original"]), (name, sample["model"])):
            yield Text.assemble((f"{writer}: ", "bold"), " ".join(text.split()))


def excerpt(prompt: str) -> str:
    """A prompt in one line, of which a long one lacks the middle."""
    prompt = " ".join(prompt.split())
    if len(prompt) <= _LONGEST:
        return prompt
    return f"{prompt[: _LONGEST * 2 // 3]} [...] {prompt[-_LONGEST // 3 :]}"
