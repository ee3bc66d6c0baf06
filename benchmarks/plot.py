"""Draw the plots of the docs from rows that are committed, as SVG that needs no library and follows dark mode.

    python benchmarks/plot.py benchmarks/peers/continuation-2048.json --out docs/results/comparison.svg
    python benchmarks/plot.py benchmarks/quality/by-size.json --out docs/results/quality.svg
    python benchmarks/plot.py benchmarks/speed/decode.json --out docs/results/decode.svg

The first has the rows of docs/results/comparison.md, which ``peers/continuation.py`` printed: a cache that grows is a
line from its size after the prompt to its size at the end. The second has those of docs/results/quality.md: a panel for
each length, a line for each kind of text. The third has those of docs/results/speed.md.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLORS = {  # each on a light and on a dark ground
    "ground": ("#f6f8fa", "#1b222b"),
    "ink": ("#33424f", "#d0d9e1"),
    "grey": ("#5b6b7b", "#a3b1bf"),
    "pale": ("#d8e0e7", "#3a4856"),
    "red": ("#c8553d", "#f0907a"),
    "blue": ("#2e7d9a", "#5fb3d1"),
    "violet": ("#7a5fa8", "#b79be0"),
    "green": ("#2f7d4f", "#6cc08d"),
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


@dataclass(frozen=True)
class Axes:
    """A panel: sizes in MiB from left to right on a logarithmic axis, nats per token from bottom to top."""

    left: float
    right: float
    top: float
    bottom: float
    mib: tuple[float, float]
    nats: tuple[float, float]

    def x(self, size: float) -> float:
        low, high = self.mib
        return self.left + (self.right - self.left) * math.log(size / low) / math.log(high / low)

    def y(self, loss: float) -> float:
        low, high = self.nats
        return self.bottom - (self.bottom - self.top) * (loss - low) / (high - low)

    def draw(self, losses: tuple[float, ...], sizes: tuple[float, ...], label: str, labels: bool = True) -> list[str]:
        parts = []
        for loss in losses:
            parts.append(line([(self.left, self.y(loss)), (self.right, self.y(loss))], "pale"))
            if labels:
                parts.append(text(self.left - 8, self.y(loss) + 4, f"{loss:g}", "grey", "end"))
        parts.append(line([(self.left, self.bottom), (self.right, self.bottom)], "grey"))
        for size in sizes:
            parts.append(line([(self.x(size), self.bottom), (self.x(size), self.bottom + 4)], "grey"))
            parts.append(text(self.x(size), self.bottom + 20, f"{size:g}", "grey", "middle"))
        return [*parts, text((self.left + self.right) / 2, self.bottom + 42, label, "grey", "middle")]


def text(x: float, y: float, words: str, color: str = "ink", anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="f-{color}" text-anchor="{anchor}"{weight}>{words}</text>'


def line(points: list[tuple[float, float]], color: str, width: float = 1) -> str:
    path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{path}" class="s-{color}" stroke-width="{width}"/>'


def dot(x: float, y: float, color: str, radius: float = 4.5) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="f-{color}"/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    rules = ["text { font-family: DejaVu Sans, Helvetica, Arial, sans-serif; font-size: 13px; }"]
    for name, (day, _) in COLORS.items():
        rules.append(f".f-{name} {{ fill: {day}; }} .s-{name} {{ stroke: {day}; fill: none; }}")
    night = [f".f-{name} {{ fill: {dark}; }} .s-{name} {{ stroke: {dark}; }}" for name, (_, dark) in COLORS.items()]
    style = "\n".join(["<style>", *rules, "@media (prefers-color-scheme: dark) {", *night, "}", "</style>"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    ground = f'<rect width="{width}" height="{height}" class="f-ground"/>'
    return "\n".join([head, f"<title>{title}</title>", style, ground, *parts, "</svg>\n"])


def comparison(found: dict[str, Any]) -> str:
    """One panel: a dot for each method at the end of the text, a line where its cache grows."""
    axes = Axes(48, 424, 66, 360, (1, 64), (-0.035, 0.32))
    parts = [text(14, 24, found["title"], bold=True), text(14, 44, "loss increase, nats per token", "grey")]
    parts += [text(470, 44, "perplexity, +", "grey", "end")]
    parts += axes.draw((0, 0.1, 0.2, 0.3), (1, 2, 4, 8, 16, 32, 64), "size of the KV cache, MiB (line: it grows)")
    for percent in (0, 10, 20, 30):
        height = axes.y(math.log1p(percent / 100))
        parts += [line([(axes.right, height), (axes.right + 4, height)], "grey")]
        parts += [text(axes.right + 8, height + 4, f"{percent} %", "grey")]
    for row in found["rows"]:
        method, (after_prompt, at_end) = row["method"], row["mib"]
        if (method, at_end) in BESIDE:
            ours = method == "dofla"
            color, losses = ("red" if ours else "blue"), [row["loss_increase"][kind][0] for kind in found["texts"]]
            x, y = axes.x(at_end), axes.y(sum(losses) / len(losses))
            dx, dy, anchor = BESIDE[method, at_end]
            parts += [line([(axes.x(after_prompt), y), (x, y)], color, 2.5), dot(x, y, color, 6 if ours else 4.5)]
            parts += [text(x + dx, y + dy, method, color, anchor, ours)]
    return picture(480, 420, found["title"], parts)


def quality(found: dict[str, Any]) -> str:
    """A panel for each length: loss increase against size, a line for each kind of text."""
    parts = [text(14, 24, found["title"], bold=True), text(14, 44, "loss increase, nats per token", "grey")]
    colors = dict(zip(found["texts"], ("blue", "red", "violet", "green"), strict=True))
    for n, (length, rows) in enumerate(found["lengths"].items()):
        left = 48 + 180 * n
        axes = Axes(left, left + 156, 92, 280, (0.3, 7), (-0.01, 0.36))
        sizes = (0.35, 0.7, 1.5, 5.8)
        parts += axes.draw((0, 0.1, 0.2, 0.3), sizes, "MiB", labels=n == 0)
        parts += [text(left + 78, 76, f"{int(length):,} tokens", anchor="middle")]
        for kind, color in colors.items():
            points = [(axes.x(row["mib"]), axes.y(row[kind][0])) for row in rows if kind in row]
            parts += [line(points, color, 2), *(dot(x, y, color, 3.5) for x, y in points)] if points else []
    at = 48
    for kind, color in colors.items():
        parts += [dot(at, 344, color, 4.5), text(at + 10, 348, kind, color)]
        at += 40 + 7.6 * len(kind)
    return picture(590, 366, found["title"], parts)


def decode(found: dict[str, Any]) -> str:
    """Milliseconds of a token against the tokens before it, on linear axes."""
    left, right, top, bottom, longest, slowest = 48, 330, 66, 280, 4096, 120
    parts = [text(14, 24, found["title"], bold=True), text(14, 44, "milliseconds", "grey")]

    def place(tokens: float, time: float) -> tuple[float, float]:
        return left + (right - left) * tokens / longest, bottom - (bottom - top) * time / slowest

    for time in range(0, slowest + 1, 40):
        parts += [line([place(0, time), place(longest, time)], "pale" if time else "grey")]
        parts += [text(left - 8, place(0, time)[1] + 4, f"{time}", "grey", "end")]
    for tokens in (0, 1024, 2048, 3072, 4096):
        parts += [text(place(tokens, 0)[0], bottom + 20, f"{tokens:,}", "grey", "middle")]
    parts += [text((left + right) / 2, bottom + 42, "tokens before", "grey", "middle")]
    for (name, times), color in zip(found["milliseconds"].items(), ("blue", "violet", "red", "green"), strict=True):
        points = [place(*point) for point in zip(found["contexts"], times, strict=True)]
        parts += [line(points, color, 2.5), *(dot(x, y, color, 3.5) for x, y in points)]
        parts += [text(points[-1][0] + 10, points[-1][1] + 4, name, color, bold=name.startswith("dofla"))]
    return picture(500, 336, found["title"], parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.rows.read_text(encoding="utf-8"))
    draw = quality if "lengths" in found else decode if "contexts" in found else comparison
    options.out.write_text(draw(found), encoding="utf-8")


if __name__ == "__main__":
    main()
