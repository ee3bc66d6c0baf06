"""Evaluation of a student's continuations: their loss under the teacher, and how long they equal the teacher's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from dofla.data import TokenWindows, batches
from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.evaluation.position import finite, ratio_error, with_error
from dofla.evaluation.sides import counted, of_both
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.positions import positions_of
from dofla.serving.prompt_state import read_prompt

NGRAM = 4
TEXTS = ("text", "teacher_greedy", "student_greedy", "teacher_sampled", "student_sampled")


@dataclass(frozen=True)
class Continuation:
    """The losses of both models on one kind of text, and the share of it that is repeated.

    Attributes:
        teacher_loss, student_loss: nats per token.
        teacher_loss_error, student_loss_error: standard errors over prompts; None for a single one.
        repeated: share of 4-grams that occurred before in the same continuation; None if it is shorter.
    """

    teacher_loss: float
    teacher_loss_error: float | None
    student_loss: float
    student_loss_error: float | None
    repeated: float | None


@dataclass(frozen=True)
class Agreement:
    """Shares of prompts where the student's greedy token is the teacher's, by position of the continuation.

    Attributes:
        forced: after the teacher's own continuation.
        token: when each goes its own way.
        prefix: and all tokens before were the same too.
    """

    forced: list[float]
    token: list[float]
    prefix: list[float]


@dataclass(frozen=True)
class Generation(Result):
    """Continuations of teacher and student.

    Attributes:
        prompts: how many.
        prompt_tokens, new_tokens: of each prompt and continuation.
        texts: under each of :data:`TEXTS`: the real ``text``, and the continuations of both models.
        agreement: of the greedy tokens.
        agreed_tokens: mean number of tokens until the two greedy continuations part.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int
    texts: dict[str, Continuation]
    agreement: Agreement
    agreed_tokens: float

    def parts(self) -> Iterator[Part]:
        """A row per continuation; agreement at the 1st, 2nd, 4th, 8th, ... new token, a row per way of asking."""
        yield f"Continuations ({self.prompts} prompts, {self.new_tokens} new tokens), nats per token"
        shown = table("continuation", "teacher's loss", "student's loss", "repeated")
        for name, row in self.texts.items():
            teacher, student = (row.teacher_loss, row.teacher_loss_error), (row.student_loss, row.student_loss_error)
            share = "" if row.repeated is None else f"{row.repeated:.1%}"
            shown.add_row(name.replace("_", ", "), with_error(*teacher), with_error(*student), share)
        yield shown
        yield f"\nGreedy tokens that agree; together for {self.agreed_tokens:.1f} tokens"
        places = [n for n in (2**k for k in range(self.new_tokens.bit_length())) if n < self.new_tokens]
        places.append(self.new_tokens)
        shown = table("new token", *map(str, places))
        names = {"forced": "after the teacher's text", "token": "each after its own", "prefix": "the same until here"}
        for key, name in names.items():
            shown.add_row(name, *(f"{getattr(self.agreement, key)[n - 1]:.0%}" for n in places))
        yield shown


@torch.inference_mode()
def generation_figures(
    student: PreTrainedModel,
    windows: TokenWindows,
    *,
    prompts: int = 32,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Generation:
    """Continuations of teacher and student from the same prompts, judged by the teacher.

    Sampling is from the models' own distributions (temperature 1). Both draw with the same random numbers, so equal
    distributions write equal texts. An end-of-text token ends nothing: packed text has them inside.

    Args:
        student: a linearized causal language model; it is its own teacher.
        windows: text; prompts are the beginnings of its windows.
        prompts: how many at most; windows with too few real tokens are passed over.
        prompt_tokens: tokens of each prompt, 2 or more.
        new_tokens: tokens of each continuation.
        batch_size: prompts per forward pass; plays no part in the figures.
        seed: of the sampling.
        progress: called with (done, total) batches.

    Raises:
        DoflaError: if the model is no causal language model or has too few positions, if no window is long enough,
            or for numbers out of range.
    """
    for name, value, least in (
        ("prompts", prompts, 1),
        ("prompt_tokens", prompt_tokens, 2),
        ("new_tokens", new_tokens, 1),
    ):
        if value < least:
            raise DoflaError(f"{name}: {value}; give {least} or more")
    check_room(student, prompt_tokens + new_tokens)
    ids = _beginnings(windows, prompts, prompt_tokens + new_tokens)
    draws = torch.rand(len(ids), new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows: dict[str, list[Tensor]] = {}
    for part in counted(batches(ids, batch_size), progress):
        here = slice(part.start, part.stop)
        for name, figures in _compare(student, ids[here].to(student.device), draws[here], prompt_tokens).items():
            rows.setdefault(name, []).append(figures.double().cpu())
    seen = {name: torch.cat(figures) for name, figures in rows.items()}
    count = torch.full((len(ids),), float(new_tokens), dtype=torch.float64)
    texts = {}
    for name in TEXTS:
        losses = (seen[f"{name} {who}"] for who in ("teacher_loss", "student_loss"))
        teacher, ours = ((loss.mean().item(), ratio_error(loss.sum(dim=1), count)) for loss in losses)
        repeats = seen[f"{name} repeated"].mean().item() if new_tokens >= NGRAM else None
        texts[name] = Continuation(*teacher, *ours, repeats)
    prefix = seen["token"].cumprod(dim=1)
    agreement = Agreement(*(shares.mean(dim=0).tolist() for shares in (seen["forced"], seen["token"], prefix)))
    return Generation(len(ids), prompt_tokens, new_tokens, texts, agreement, prefix.sum(dim=1).mean().item())


def check_room(model: PreTrainedModel, tokens: int) -> None:
    """DoflaError unless the model writes text from left to right, and has positions for so many tokens."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(f"{type(model).__name__} does not continue a text: give a causal language model")
    positions = positions_of(model)
    if positions is not None and tokens > positions:
        raise DoflaError(f"{tokens} tokens, and {type(model).__name__} has {positions} positions: ask for fewer tokens")


def last_logits(model: PreTrainedModel, ids: Tensor, keep: int, **options: Any) -> Tensor:
    """Logits [B, keep, V] after the last ``keep`` tokens of ``ids`` [B, L]; the others, which can be large, are not
    computed where the model can leave them out."""
    if model._supports_logits_to_keep():  # type: ignore[operator] # of their GenerationMixin
        # As places, not as a number: a slice is not contiguous, and its product with a vocabulary many times slower.
        options["logits_to_keep"] = torch.arange(ids.shape[1] - keep, ids.shape[1], device=ids.device)
    return finite(model(ids, **options).logits[:, -keep:])


def decode(model: PreTrainedModel, cache: Cache, last: Tensor, new_tokens: int, draws: Tensor | None = None) -> Tensor:
    """The next tokens [B, new_tokens], one at a time; the cache goes on with them.

    Args:
        model: in the attention that made the cache.
        cache: of all tokens but the last.
        last: the last token [B, 1].
        new_tokens: how many.
        draws: uniform numbers [B, new_tokens] to sample by (inverse distribution function); None takes the likeliest.
    """
    out = []
    for n in range(new_tokens):
        logits = model(last, use_cache=True, **{CACHE_ARGUMENT: cache}).logits[:, -1].float()
        if draws is None:
            last = logits.argmax(dim=-1, keepdim=True)
        else:
            shares = logits.double().softmax(dim=-1).cumsum(dim=-1)
            chosen = torch.searchsorted(shares, draws[:, n : n + 1].to(shares) * shares[:, -1:], right=True)
            last = chosen.clamp(max=shares.shape[1] - 1)
        out.append(last)
    return torch.cat(out, dim=1)


def repeated(tokens: Tensor) -> Tensor:
    """Share of the 4-grams of each row of ``tokens`` [B, T] that stood in the row before [B]."""
    grams = tokens.unfold(1, NGRAM, 1).tolist()
    shares = [1 - len({tuple(gram) for gram in row}) / max(1, len(row)) for row in grams]
    return torch.tensor(shares, dtype=torch.float64)


def _beginnings(windows: TokenWindows, count: int, length: int) -> Tensor:
    """The first ``length`` real tokens of the first ``count`` windows that have so many."""
    mask = windows.attention_mask
    rows = (
        windows.input_ids if mask is None else [ids[m.bool()] for ids, m in zip(windows.input_ids, mask, strict=True)]
    )
    long_enough = [row[:length] for row in rows if len(row) >= length][:count]
    if not long_enough:
        raise DoflaError(
            f"no window has {length} tokens for prompt and continuation: give longer windows or ask for less"
        )
    return torch.stack(long_enough)


def _new_logits(model: PreTrainedModel, ids: Tensor, new: int) -> Tensor:
    """Logits [B, new, V] that the last ``new`` tokens of ``ids`` were chosen by."""
    return last_logits(model, ids, new + 1, use_cache=False)[:, :-1]


def _compare(student: PreTrainedModel, ids: Tensor, draws: Tensor, prompt_tokens: int) -> dict[str, Tensor]:
    """Figures of each prompt, by name."""
    prompt, new = ids[:, :prompt_tokens], draws.shape[1]
    texts = {"text": ids[:, prompt_tokens:]}

    def write(model: PreTrainedModel, numbers: Tensor | None) -> Tensor:
        return decode(model, read_prompt(model, prompt[:, :-1]), prompt[:, -1:], new, numbers)

    for how, numbers in (("greedy", None), ("sampled", draws)):
        texts[f"teacher_{how}"], texts[f"student_{how}"] = of_both(student, write, numbers)
    out = {"token": texts["teacher_greedy"] == texts["student_greedy"]}
    for name, text in texts.items():
        whole = torch.cat([prompt, text], dim=1)
        teacher, ours = of_both(student, _new_logits, whole, new)
        if name == "teacher_greedy":
            out["forced"] = ours.argmax(dim=-1) == text
        for who, logits in (("teacher_loss", teacher), ("student_loss", ours)):
            out[f"{name} {who}"] = -torch.log_softmax(logits, dim=-1).gather(-1, text.unsqueeze(-1))[..., 0]
        out[f"{name} repeated"] = repeated(text) if new >= NGRAM else torch.zeros(len(text))
    return out
