"""Attention maps of teacher and student on a short text, small enough to stand in a page."""

from __future__ import annotations

import base64
import zlib

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.distillation.losses import student_log_scores
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.student import Student
from dofla.integration.surgery import softmax

LEVELS = 31
"""Shades of a map: the square root of attention in so many steps, so that a half of a percent still shows."""

LENGTHS = (32, 96)
_ENTRIES = 4_000_000
"""Number of entries of all maps of a run together: about a megabyte of page."""


def sentence(windows: TokenWindows, pieces: list[str], heads: int, models: int) -> tuple[int, int]:
    """Where in the first window a text begins and ends that is worth looking at.

    Args:
        windows: held-out text.
        pieces: the first window's tokens as text.
        heads: of the whole model, which with ``models``, the teacher and its students, decide how long it may be.

    Returns:
        Positions: the first token after an end of a sentence, if there is one early on, and one after the last.
    """
    shortest, longest = LENGTHS
    length = int((_ENTRIES / (heads * models)) ** 0.5) // 8 * 8
    length = min(max(length, shortest), longest, len(pieces))
    stops = [
        n + 1 for n, piece in enumerate(pieces[: len(pieces) - length]) if piece.rstrip().endswith((".", "!", "?"))
    ]
    # A padded window is one text, whose beginning is one already.
    start = stops[0] if stops and windows.attention_mask is None else 0
    return start, start + length


@torch.no_grad()
def attention_maps(student: PreTrainedModel, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Attention of teacher and student, each in its own forward pass of ``ids`` [1, T]: by layer, [heads, T, T]."""
    layers = Student.of(student).layers
    rows = torch.arange(ids.shape[1], device=ids.device)
    teacher: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}

    def look(call: AttentionCall) -> None:
        teacher[call.name] = call.log_weights().exp()[0].cpu()

    def look_at_student(call: AttentionCall) -> None:
        ours[call.name] = student_log_scores(call, layers[call.name], rows).softmax(dim=-1)[0].cpu()

    with softmax(student), recording(student, layers, look):
        run_body(student, {"input_ids": ids})
    with recording(student, layers, look_at_student, linear=True):
        run_body(student, {"input_ids": ids})
    return teacher, ours


def packed(maps: dict[str, Tensor]) -> dict[str, str]:
    """Maps by layer as text: levels of sqrt(attention), a byte each, deflated, in base64."""
    return {name: _packed(values) for name, values in maps.items()}


def _packed(values: Tensor) -> str:
    levels = (LEVELS * values.float().sqrt()).round().to(torch.uint8).contiguous().numpy().tobytes()
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(deflate.compress(levels) + deflate.flush()).decode("ascii")


def moved(teacher: dict[str, Tensor], student: dict[str, Tensor]) -> dict[str, list[float]]:
    """The share of attention that goes elsewhere in each head, by layer: ½ Σ |difference|, mean over rows, 0 to 1."""
    shares = {name: (teacher[name] - own).abs().sum(-1).mean(-1) / 2 for name, own in student.items()}
    return {name: [round(share, 4) for share in values.tolist()] for name, values in shares.items()}


def token_texts(tokenizer: PreTrainedTokenizerBase | None, ids: list[int]) -> list[str]:
    """The text of each token: what it adds to the text before it. A character of several tokens comes with the last."""
    if tokenizer is None:
        return [f" {number}" for number in ids]
    texts, before = [], ""
    for n in range(1, len(ids) + 1):
        now = str(tokenizer.decode(ids[:n])).rstrip("\N{REPLACEMENT CHARACTER}")
        texts.append(now[len(before) :])
        before = now
    return texts
