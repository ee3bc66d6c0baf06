"""Draw loss increase against the size of the cache, one method beside another, as an SVG that needs no library.

    python benchmarks/peers/plot.py benchmarks/peers/continuation-2048.json --out docs/results/comparison.svg

The file has the rows of the table at 2,048 tokens in docs/results/comparison.md, which ``continuation.py`` printed. A
cache that grows is a line from its size after the prompt to its size at the end; a dot stands at the end.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT = 480, 420
LEFT, RIGHT, TOP, FLOOR = 48, 424, 66, 360
SMALLEST, LARGEST, LOWEST, HIGHEST = 1.0, 64.0, -0.035, 0.32  # MiB, MiB, nats, nats
TICKS = (1, 2, 4, 8, 16, 32, 64)
PERPLEXITY = (0, 10, 20, 30)  # percent
COLORS = {  # each by day and by night, on a light and a dark ground
    "ground": ("#f6f8fa", "#1b222b"),
    "ink": ("#33424f", "#d0d9e1"),
    "grey": ("#5b6b7b", "#a3b1bf"),
    "pale": ("#d8e0e7", "#3a4856"),
    "dofla": ("#c8553d", "#f0907a"),
    "peer": ("#2e7d9a", "#5fb3d1"),
}
BESIDE = {  # where the label of a method stands from its dot: x, y and the end of the text that is there
    ("softmax cache", 45.0): (16, 22, "end"),
    ("4-bit QuantizedCache", 14.7): (14, 22, "end"),
    ("dofla", 1.5): (11, 5, "start"),
    ("dofla", 5.8): (-10, 0, "end"),
    ("KVzip", 12.7): (9, 5, "start"),
    ("KVzip", 17.1): (9, 4, "start"),
    ("ExpectedAttention", 12.7): (9, 4, "start"),
    ("ExpectedAttention", 17.1): (-40, -8, "start"),
    ("int8 window", 1.5): (10, 5, "start"),
    ("int8 window", 5.9): (-10, 5, "end"),
}


def across(size: float) -> float:
    """Position of a size in MiB, on a logarithmic axis."""
    return LEFT + (RIGHT - LEFT) * math.log(size / SMALLEST) / math.log(LARGEST / SMALLEST)


def up(loss: float) -> float:
    """Height of a loss increase in nats per token."""
    return FLOOR - (FLOOR - TOP) * (loss - LOWEST) / (HIGHEST - LOWEST)


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start", weight: str = "") -> str:
    bold = ' font-weight="bold"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="f-{kind}" text-anchor="{anchor}"{bold}>{words}</text>'


def line(x: float, y: float, x2: float, y2: float, kind: str, width: float = 1) -> str:
    return f'<path d="M{x:.1f} {y:.1f} L{x2:.1f} {y2:.1f}" class="s-{kind}" stroke-width="{width}"/>'


def style() -> str:
    day = [f".f-{name} {{ fill: {c[0]}; }} .s-{name} {{ stroke: {c[0]}; fill: none; }}" for name, c in COLORS.items()]
    night = [f".f-{name} {{ fill: {c[1]}; }} .s-{name} {{ stroke: {c[1]}; }}" for name, c in COLORS.items()]
    font = "text { font-family: DejaVu Sans, Helvetica, Arial, sans-serif; font-size: 13px; }"
    return "\n".join(["<style>", font, *day, "@media (prefers-color-scheme: dark) {", *night, "}", "</style>"])


def axes() -> list[str]:
    parts = []
    for loss in (0, 0.1, 0.2, 0.3):
        parts += [
            line(LEFT, up(loss), RIGHT, up(loss), "pale"),
            text(LEFT - 8, up(loss) + 4, f"{loss:g}", "grey", "end"),
        ]
    for percent in PERPLEXITY:
        height = up(math.log1p(percent / 100))
        parts += [line(RIGHT, height, RIGHT + 4, height, "grey"), text(RIGHT + 8, height + 4, f"{percent} %", "grey")]
    parts.append(line(LEFT, FLOOR, RIGHT, FLOOR, "grey"))
    for size in TICKS:
        parts += [line(across(size), FLOOR, across(size), FLOOR + 4, "grey")]
        parts += [text(across(size), FLOOR + 20, f"{size}", "grey", "middle")]
    parts += [text((LEFT + RIGHT) / 2, FLOOR + 42, "size of the KV cache, MiB (line: it grows)", "grey", "middle")]
    parts += [
        text(14, TOP - 22, "loss increase, nats", "grey"),
        text(WIDTH - 10, TOP - 22, "perplexity, +", "grey", "end"),
    ]
    return parts


def row(method: str, after_prompt: float, at_end: float, losses: list[float]) -> list[str]:
    kind = "dofla" if method == "dofla" else "peer"
    x, y = across(at_end), up(sum(losses) / len(losses))
    parts = []
    if at_end > after_prompt:
        parts.append(line(across(after_prompt), y, x, y, kind, 2.5))
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if kind == "dofla" else 4.5}" class="f-{kind}"/>')
    dx, dy, anchor = BESIDE[method, at_end]
    return [*parts, text(x + dx, y + dy, method, kind, anchor, "bold" if kind == "dofla" else "")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.rows.read_text(encoding="utf-8"))
    parts = [text(14, 24, found["title"], "ink", weight="bold"), *axes()]
    for each in found["rows"]:
        if (each["method"], each["mib"][1]) in BESIDE:
            losses = [each["loss_increase"][kind][0] for kind in found["texts"]]
            parts += row(each["method"], *each["mib"], losses)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" class="f-ground"/>'
    picture = [head, f"<title>{found['title']}</title>", style(), ground, *parts, "</svg>\n"]
    options.out.write_text("\n".join(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
