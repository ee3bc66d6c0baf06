"""Draws the pictures of docs/maths:  python scripts/docs/pictures.py"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

from dofla.plans.compressed import even_counts

from dofla.attention.coding.coder import spread
from dofla.attention.coding.levels import levels
from dofla.attention.constants import UNIT
from dofla.plans.hybrid import HeadCost

OUT = Path(__file__).parents[2] / "docs" / "maths"
RED, BLUE, GREY, DARK, PALE = "#c8553d", "#2e7d9a", "#5b6b7b", "#17324d", "#d8e0e7"
GROUND, INK = "#f6f8fa", "#33424f"
_AT_NIGHT = {
    **{RED: "#f0907a", BLUE: "#5fb3d1", GREY: "#a3b1bf", DARK: "#dce8f3", PALE: "#3a4856"},
    **{GROUND: "#1b222b", INK: "#d0d9e1"},
}


def _at_night() -> str:
    """Colors by the reader's scheme, which pages hand on to their pictures."""
    rules = []
    for day, night in _AT_NIGHT.items():
        rules += [f'[fill="{day}"], [style="fill:{day}"] {{ fill: {night} !important; }}']
        rules += [f'[stroke="{day}"] {{ stroke: {night}; }}']
    rules += [
        f"{kind} {{ fill: {_AT_NIGHT[day]}; }}" for kind, day in (("text", INK), (".title", DARK), (".small", GREY))
    ]
    return "\n".join(rules)


_STYLE = f"""<style>
text {{ font-family: DejaVu Sans, Helvetica, Arial, sans-serif; font-size: 14px; fill: {INK}; }}
.title {{ font-weight: bold; fill: {DARK}; }}
.small {{ font-size: 12.5px; fill: {GREY}; }}
@media (prefers-color-scheme: dark) {{
{_at_night()}
}}
</style>
<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">
<path d="M0,0 L10,5 L0,10 z" fill="{GREY}"/></marker></defs>"""


def picture(name: str, height: int, title: str, parts: list[str]) -> None:
    """Write an SVG 560 units wide."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 {height}" role="img">'
    ground = f'<rect width="560" height="{height}" fill="{GROUND}"/>'
    body = "\n".join([head, f"<title>{title}</title>", _STYLE, ground, *parts, "</svg>\n"])
    (OUT / f"{name}.svg").write_text(body, encoding="utf-8")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", color: str = "") -> str:
    style = f' style="fill:{color}"' if color else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{style}>{words}</text>'


def box(x: float, y: float, w: float, h: float, color: str, opacity: float = 1, radius: float = 0) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius}"'
    return f'<rect {place} fill="{color}" opacity="{opacity:.2f}"/>'


def line(points: list[tuple[float, float]], color: str = GREY, width: float = 1.2, more: str = "") -> str:
    path = " ".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(points))
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" {more}/>'


def arrow(*points: tuple[float, float]) -> str:
    return line(list(points), GREY, 1.6, 'marker-end="url(#head)"')


def dot(x: float, y: float, radius: float, color: str, opacity: float = 1) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}" opacity="{opacity:.2f}"/>'


def smoothing() -> None:
    """A kernel smoother over keys on a line: values, the weights one query gives, and what comes out everywhere."""
    draw = Random(3)
    keys = sorted(draw.uniform(0.2, 9.8) for _ in range(26))
    values = [math.sin(0.8 * key) + draw.gauss(0, 0.35) for key in keys]
    query, width = 3.4, 0.75

    def weights(at: float) -> list[float]:
        raw = [math.exp(-((at - key) ** 2) / (2 * width**2)) for key in keys]
        return [weight / sum(raw) for weight in raw]

    def x(key: float) -> float:
        return 30 + 50 * key

    def y(value: float) -> float:
        return 118 - 46 * value

    smooth = [(x(at / 20), y(sum(w * v for w, v in zip(weights(at / 20), values, strict=True)))) for at in range(201)]
    own = weights(query)
    mean = sum(w * v for w, v in zip(own, values, strict=True))
    parts = [text(20, 26, "Each key has a value; a query takes their weighted mean", "title")]
    parts += [line(smooth, BLUE, 2.4), line([(x(query), 40), (x(query), 282)], RED, 1.2, 'stroke-dasharray="4 3"')]
    parts += [dot(x(k), y(v), 4.5, GREY, 0.25 + 0.75 * w / max(own)) for k, v, w in zip(keys, values, own, strict=True)]
    parts += [dot(x(query), y(mean), 6, RED), text(x(query) + 12, y(mean) - 12, "the output", "", "start", RED)]
    parts += [line([(30, 282), (530, 282)])]
    parts += [box(x(k) - 3, 282 - 230 * w, 6, 230 * w, RED) for k, w in zip(keys, own, strict=True)]
    parts += [text(x(query), 300, "query", "small", "middle"), text(530, 300, "keys", "small", "end")]
    parts += [text(x(5.3), 262, "its weights, which sum to one", "small")]
    picture("smoothing", 312, "Attention as a kernel smoother", parts)


def slots() -> None:
    """A cache that grows beside slots that do not."""
    parts = [text(20, 26, "softmax: a row per token", "title"), text(310, 26, "features: M slots", "title")]
    for n in range(11):
        top = 44 + 18 * n
        parts += [box(24, top, 70, 12, GREY, 0.45, 2), box(100, top, 100, 12, BLUE, 0.55, 2)]
    parts += [text(59, 258, "keys", "small", "middle"), text(150, 258, "values", "small", "middle")]
    parts += [arrow((222, 50), (222, 244)), text(230, 150, "grows", "small")]
    masses = [0.9, 0.25, 0.6, 0.4]
    for n, mass in enumerate(masses):
        top = 64 + 44 * n
        parts += [box(320, top, 100, 26, BLUE, 0.65, 3), box(440, top, 90 * mass, 26, RED, 0.75, 3)]
        parts += [line([(440, top), (530, top), (530, top + 26), (440, top + 26), (440, top)], GREY, 0.8)]
    parts += [text(370, 258, "mean value", "small", "middle"), text(485, 258, "mass", "small", "middle")]
    parts += [text(20, 284, "Each slot holds the mean of the values whose keys have its feature, and how", "small")]
    parts += [text(20, 301, "much there was of them. A query weighs M slots instead of all tokens.", "small")]
    picture("slots", 314, "A growing cache and a fixed number of slots", parts)


def delay_line() -> None:
    """Sinks, the far past in features, the window, and where a token goes."""
    size, top = 19, 64
    parts = [text(20, 26, "Where a token is: first in the window, later in the features", "title")]
    for n in range(26):
        color = RED if n < 2 else BLUE if n >= 19 else PALE
        parts.append(box(24 + 20 * n, top, size - 2, 26, color, 1 if color != PALE else 0.9, 2))
    parts += [text(43, top - 10, "sinks", "", "middle", RED), text(233, top - 10, "the far past", "", "middle")]
    parts += [text(473, top - 10, "window", "", "middle", BLUE)]
    parts += [arrow((413, top + 32), (413, 128), (290, 128), (290, 148))]
    parts += [text(421, 122, "leaves the window:", "small"), text(421, 138, "enters the features", "small")]
    for n in range(17):
        parts.append(line([(74 + 20 * n, top + 28), (215 + 4 * n, 150)], PALE, 1))
    for n in range(6):
        parts.append(box(207 + 25 * n, 152, 22, 30, BLUE, 0.35 + 0.1 * n, 3))
    parts += [text(282, 200, "M slots: mean value and log-mass", "small", "middle")]
    parts += [text(43, 122, "exact", "small", "middle"), text(505, 176, "exact", "small", "middle")]
    parts += [arrow((43, 128), (43, 226)), arrow((282, 206), (282, 226)), arrow((505, 182), (505, 226))]
    parts += [box(20, 230, 524, 30, DARK, 0.1, 4)]
    parts += [text(282, 250, "one sum of weighted values, divided by one sum of weights", "", "middle")]
    picture("delay-line", 276, "Window, sinks and features", parts)


def degrees() -> None:
    """Two spectra of the same sum, and what counts of each eigenvalue at a tolerance."""
    lam = 2.0**-8
    parts = [text(20, 26, "Eigenvalues above the tolerance count, those below hardly do", "title")]
    for left, ratio, name in ((24, 0.72, "head A"), (300, 0.3, "head B")):
        raw = [ratio**n for n in range(22)]
        values = [value / sum(raw) for value in raw]
        counts = [value / (value + lam) for value in values]

        def height(value: float) -> float:
            return max(0.0, 170 * (1 + math.log10(value) / 4))

        floor = 236
        for n, (value, count) in enumerate(zip(values, counts, strict=True)):
            if height(value) > 0:
                parts.append(box(left + 10.5 * n, floor - height(value), 8.5, height(value), BLUE, 0.12 + 0.88 * count))
        at = floor - height(lam)
        parts += [line([(left, at), (left + 232, at)], RED, 1.4, 'stroke-dasharray="5 3"')]
        parts += [line([(left, floor), (left + 232, floor)])]
        parts += [text(left + 232, at - 6, "λ", "", "end", RED)]
        parts += [text(left + 100, 62, f"{name}: N(λ) = {sum(counts):.1f}")]
    parts += [text(24, 256, "eigenvalues, the largest first; logarithmic", "small")]
    parts += [text(24, 274, "The color of a bar is the share σ / (σ + λ) that counts; their sum is N(λ).", "small")]
    picture("degrees", 288, "Degrees of freedom of two spectra", parts)


def knapsack() -> None:
    """Two error curves, and the split of bytes at which the last byte gains as much on either."""
    parts = [text(20, 26, "At the best split the last byte gains equally much everywhere", "title")]
    curves = {"head A": (9.0, 0.9), "head B": (2.2, 0.75)}

    def loss(name: str, size: float) -> float:
        scale, power = curves[name]
        return scale * size**-power

    def slope(name: str, size: float) -> float:
        scale, power = curves[name]
        return scale * power * size ** (-power - 1)

    price = slope("head A", 6.0)
    for left, name, color in ((40, "head A", BLUE), (316, "head B", RED)):
        scale, power = curves[name]
        best = (scale * power / price) ** (1 / (power + 1))

        def place(size: float, value: float, left: int = left) -> tuple[float, float]:
            return left + 17 * size, 236 - 34 * value

        points = [place(n / 10, loss(name, n / 10)) for n in range(4, 125) if loss(name, n / 10) < 5.4]
        parts += [line(points, color, 2.4), line([(left, 50), (left, 236), (left + 216, 236)])]
        ends = [best - min(best, 3.2), best + 3.2]
        parts.append(line([place(e, loss(name, best) - price * (e - best)) for e in ends], GREY, 1.4))
        x, y = place(best, loss(name, best))
        parts += [dot(x, y, 5, DARK), line([(x, y), (x, 236)], GREY, 1, 'stroke-dasharray="3 3"')]
        parts += [text(left + 110, 74, name, "", "start", color), text(left + 216, 254, "bytes", "small", "end")]
        parts += [text(x, 254, "its share", "small", "middle")]
    parts += [text(40, 44, "expected loss = effect × error", "small")]
    parts += [text(20, 280, "The slopes are the same: a byte moved from one head to the other would cost", "small")]
    parts += [text(20, 297, "more than it brings.", "small")]
    picture("knapsack", 310, "A budget spread over error curves", parts)


def memory() -> None:
    """What a KV head holds of a long text: as wide as there are tokens, as high as they have bits."""
    dim, floor, per_token, per_bit = 64, 224, 1.55, 13
    cost = HeadCost.of(dim, dim, 4, "int8")
    found = even_counts(64, dim, dim, cost)
    ((newest, far),) = found.tiers
    parts = [text(20, 28, "The life of a token in the cache of a KV head", "title")]
    parts += [text(540, 62, "a new token", "small", "end"), arrow((458, 58), (150, 58))]
    parts += [text(142, 62, "evicted", "small", "end")]
    columns = [
        (540, found.window, 8, BLUE, "local window", "int8"),
        (466, newest, far, BLUE, "older tokens", f"{far:g} bits"),
        (340, found.heavy_hitters, far, RED, "heavy hitters", f"{far:g} bits, by attention"),
    ]
    for right, tokens, bits, color, name, precision in columns:
        width, height = per_token * tokens, per_bit * bits
        at, anchor = (right, "end") if bits == 8 else (right - width / 2, "middle")
        parts.append(box(right - width, floor - height, width, height, color, 0.35 + 0.65 * (bits == 8), 2))
        parts += [text(at, floor - height - 24, name, "", anchor, color)]
        parts += [text(at, floor - height - 8, precision, "small", anchor)]
        parts += [text(at, floor + 19, f"{tokens} tokens", "small", anchor)]
        parts += [arrow((right - width / 2, floor + 26), (right - width / 2, floor + 46))]
    parts += [box(24, floor - 8 * per_bit, 8, 8 * per_bit, DARK, 1, 2), arrow((28, floor + 26), (28, floor + 46))]
    parts += [text(24, floor - 8 * per_bit - 24, "attention sinks", "", "start", DARK)]
    parts += [
        text(24, floor - 8 * per_bit - 8, "int8", "small"),
        text(24, floor + 19, f"{found.sinks} tokens", "small"),
    ]
    parts += [line([(20, floor), (544, floor)]), box(20, floor + 50, 524, 30, DARK, 0.1, 4)]
    parts += [text(282, floor + 70, "one softmax over all of them", "", "middle")]
    picture("memory", 318, "The life of a token in the compressed cache", parts)


def coding() -> None:
    """Directions of falling variance in blocks with bits of their own, and the levels of a number."""
    floor, height = 150, 96
    variance = [0.91**n + 0.015 for n in range(64)]
    means = [sum(variance[n : n + 16]) / 16 for n in range(0, 64, 16)]
    parts = [text(20, 26, "Bits go where errors matter", "title")]
    parts += [text(326, 26, "The 64 levels of 3 bits", "title")]
    for block, (mean, bits) in enumerate(zip(means, spread(means, 3), strict=True)):
        left = 24 + 66 * block
        for n in range(16):
            tall = height * variance[16 * block + n]
            parts.append(box(left + 3.9 * n, floor - tall, 3, tall, BLUE, 0.75))
        parts += [line([(left - 1, floor - height * mean), (left + 62, floor - height * mean)], RED, 2)]
        parts += [text(left + 31, floor + 18, f"{bits} bits", "", "middle")]
    parts += [line([(20, floor), (288, floor)])]
    parts += [text(24, floor + 42, "the variance of 64 directions, in four blocks;", "small")]
    parts += [line([(24, floor + 54), (42, floor + 54)], RED, 2)]
    parts += [text(50, floor + 58, "after the rotation in each", "small")]

    def place(x: float) -> float:
        return 446 + 34 * x

    for code, own in enumerate((levels(3) / UNIT).view(8, 8).tolist()):
        tall = floor - 6 - 11.5 * code
        parts += [line([(place(-3), tall), (place(3), tall)], GREY, 0.6)]
        parts += [dot(place(level), tall, 3, RED) for level in own]
        parts += [text(place(-3) - 8, tall + 4, f"{code:03b}", "small", "end")]
    parts += [text(446, floor + 20, "numbers of a block, in its own unit", "small", "middle")]
    parts += [text(446, floor + 42, "the bits before say which row,", "small", "middle")]
    parts += [text(446, floor + 58, "a number's own which level of it", "small", "middle")]
    picture("coding", 224, "Blocks of directions, and levels of a trellis", parts)


if __name__ == "__main__":
    for draw in (smoothing, slots, delay_line, degrees, knapsack, memory, coding):
        draw()
