"""A memory that fades, at once, and what its forgetting does to the model, head by head, measured in one pass over the
text.

A student is made whose KV heads all have the same size, and a small one; what forgetting costs in each head of it
(:mod:`dofla.distillation.forgetting`) says which of them want the bytes. Most heads look at little that is far, and a
few look things up (retrieval heads, Wu et al. 2024, arXiv 2404.15574): bytes go to them, and with ``retrieval_heads``
as many of them as are asked for hold all tokens, as DuoAttention (Xiao et al. 2024, arXiv 2410.10819) keeps them whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import count

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.display import Bar, reports_progress
from dofla.distillation.forgetting import costs_of_heads
from dofla.distillation.retrieval import facts_for, with_retrieval_heads
from dofla.errors import DoflaError
from dofla.integration.fading import fading_plan, measure_directions
from dofla.integration.places import placed_over, whole_reach
from dofla.integration.positions import positions_of
from dofla.integration.reading import windows_for
from dofla.integration.streaming import is_streamed
from dofla.integration.surgery import describe, linearize, plan_of, restore
from dofla.integration.wrapped import unwraps_its_model
from dofla.plans.shares import LEAST, Shares, shared
from dofla.storage.defaults import with_torchs_defaults

WAYS = ("measured", "even")
"""How KV heads may share the bytes."""
HELD = 0.25
"""Of a window, the most that a memory holds with which shares are measured: what a head would do with four times as
much can be seen in it."""
SMALLEST = 16
"""Features per KV head with which they are measured however short windows are."""
TWICE, LOOKED_UP = 1 / 3, 0.05
"""How much of the text is also read twice, where everything can be looked up the second time; and what the loss on that
counts for beside the loss on the text."""
BACK = 1024
"""How far back it then stands, if the model has so many positions. Other heads look up what stands far back than what
is near: with 256, one that a needle 4,096 tokens back hangs on got half of the bytes that it wants."""
_REFERENCE, _ANY = 64, 2**31  # features whose memory is counted in tokens, were there positions for any number


@unwraps_its_model
@with_torchs_defaults
def measure_shares(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    budget: int = 64,
    *,
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    reach: int | None = None,
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Shares:
    """How the bytes of a memory that fades are best shared among KV heads; :func:`dofla.fade` spends them so.

    Args:
        model: as for :func:`dofla.fade`; it is linearised in between, and restored.
        tokens: a dozen windows, of any text.
        budget: that they are for, in features per KV head; fewer are measured with where a memory of so many would hold
            more than a quarter of a window.
        keep_softmax: layers to leave out.
        batch_size: windows per pass, forward and backward; text that stands twice is read in as many tokens, but at
            least one document of up to 2,048.
        reach, retrieval_heads, tokenizer: as for :func:`dofla.fade`.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Raises:
        DoflaError: as :func:`dofla.fade`; a model that predicts no tokens; a streamed one.
    """
    windows, wanted = windows_for(model, tokens), (retrieval_heads, tokenizer)
    return _measured(model, windows, budget, keep_softmax, batch_size, reach, *wanted, progress=progress)


@unwraps_its_model
@with_torchs_defaults
def fade(
    model: PreTrainedModel,
    tokens: TokenWindows | Tensor | Mapping[str, Tensor],
    *,
    budget: int = 64,
    shares: Shares | str = "measured",
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    reach: int | None = None,
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedModel:
    """Give a causal model a memory that fades, in place and without training: tokens lose bits as they age, and are
    forgotten at the end.

    Args:
        model: any causal model that :func:`dofla.linearize` takes.
        tokens: a dozen windows of any text, to measure shares, and the means and directions of keys and values on.
        budget: bytes, as so many features per KV head, in the mean over heads.
        shares: how KV heads share them: ``measured``, by :func:`dofla.measure_shares` on the same windows; ``even``,
            all the same, which takes no gradients and a tenth of the time; or what was measured before.
        keep_softmax: layers to leave as they are.
        batch_size: windows per pass.
        reach: positions that the memory is for: windows are read as if they stood here and there among so many, and no
            KV head gets places for more tokens. Default all that the model has; windows are moved where they are
            rotary. Fewer are a little better within, and much worse beyond.
        retrieval_heads: how many KV heads hold every token of ``reach``: those on which most hangs when facts are
            looked up that stand among the windows' text, and what was measured besides. A choice between text and
            facts: the others pay for it.
        tokenizer: the model's, to tell such facts; without retrieval heads there is no need of it.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: as :func:`dofla.linearize`; an encoder, which keeps nothing from token to token; a budget too small
            for a token of each kind, or for so many retrieval heads; heads whose size is no multiple of 8; as
            :func:`dofla.measure_shares`.
    """
    if not isinstance(shares, Shares) and shares not in WAYS:
        raise DoflaError(f"shares is {shares!r}: give {', '.join(WAYS)}, or what dofla.measure_shares returned")
    if retrieval_heads and shares != "measured":
        raise DoflaError(
            f"retrieval_heads is {retrieval_heads}: they are found when shares are measured, "
            "so leave shares out, or give what dofla.measure_shares returned with them"
        )
    if shares == "measured":
        windows, wanted = windows_for(model, tokens), (retrieval_heads, tokenizer)
        shares = _measured(model, windows, budget, keep_softmax, batch_size, reach, *wanted)
    known = shares if isinstance(shares, Shares) else None
    linearize(model, fading_plan(model, budget, shares=known, keep_softmax=keep_softmax, reach=reach))
    try:
        measure_directions(model, tokens, batch_size=batch_size, reach=reach)
    except BaseException:
        restore(model)
        raise
    return model


def measured_at(model: PreTrainedModel, budget: int, windows: TokenWindows, keep_softmax: Collection[str] = ()) -> int:
    """The budget that shares of ``budget`` are measured with: one that holds no more than :data:`HELD` of a window."""
    even = fading_plan(model, _REFERENCE, keep_softmax=keep_softmax, reach=_ANY)
    held = [layer.places_per_head[0] for layer in even.layers]
    return min(budget, max(SMALLEST, math.floor(_REFERENCE * HELD * windows.length / max(held, default=1))))


@reports_progress("shares", Bar.stage)
def _measured(
    model: PreTrainedModel,
    windows: TokenWindows,
    budget: int,
    keep_softmax: Collection[str],
    batch_size: int,
    reach: int | None,
    retrieval_heads: int,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    progress: Callable[[str, int, int], None] | None,
) -> Shares:
    if is_streamed(model):
        raise DoflaError("measuring shares needs the whole model in memory: open it without stream, or split evenly")
    fading_plan(model, budget, keep_softmax=keep_softmax)  # what is wrong with it is wrong with any share
    facts = facts_for(model, windows, retrieval_heads, tokenizer, budget, keep_softmax, reach)
    least = measured_at(model, budget, windows, keep_softmax)
    try:
        fading_plan(model, math.floor(LEAST * least), keep_softmax=keep_softmax)
    except DoflaError:
        share = f"a KV head's least share is {LEAST:.2f} of it"
        raise DoflaError(f"budget {least} is too small to share: {share}; give more, or shares='even'") from None
    student = linearize(model, fading_plan(model, least, keep_softmax=keep_softmax))
    try:
        measure_directions(student, windows, batch_size=batch_size, reach=reach)
        twice = _twice(windows, (reach or positions_of(model) or 2 * BACK) // 2)
        everywhere = whole_reach(model, windows, reach)
        per_pass = batch_size * windows.length
        kinds = [list(placed_over(x, max(1, per_pass // x.length), everywhere)) for x in (windows, twice)]
        report = _report(progress, sum(map(len, kinds)) + (len(facts.documents) if facts else 0))
        text, looked_up = (costs_of_heads(student, parts, report) for parts in kinds)
        costs = {name: (own + LOOKED_UP * looked_up[name]).tolist() for name, own in text.items()}
        plan = plan_of(student)
        sizes = {name: plan[name].state_bytes(model.dtype.itemsize) // len(own) for name, own in costs.items()}
    finally:
        restore(model)
    made_by = {"budget": least, "tokens": windows.tokens, "source": windows.source, "reach": everywhere}
    shares = Shares(shared(sizes, costs), costs, describe(model)["name"], made_by)
    if facts is None:
        return shares
    return with_retrieval_heads(
        model, shares, retrieval_heads, facts, windows, budget, keep_softmax=keep_softmax, reach=reach, report=report
    )


def _twice(windows: TokenWindows, most: int) -> TokenWindows:
    """Some of the windows, as many side by side as :data:`BACK` tokens take, or ``most``, or what there is of a longer
    one; all of that twice."""
    some = windows.take(math.ceil(TWICE * len(windows)))
    back = max(1, min(BACK, most, len(some) * windows.length))
    beside = max(1, back // windows.length)

    def rows(x: Tensor) -> Tensor:
        return x[: len(x) // beside * beside].reshape(-1, beside * windows.length)[:, :back].repeat(1, 2)

    mask = some.attention_mask
    return replace(
        some, input_ids=rows(some.input_ids), attention_mask=None if mask is None else rows(mask), texts=None
    )


def _report(progress: Callable[[str, int, int], None] | None, total: int) -> Callable[[], None]:
    """What to call after each pass."""
    done = count(1)
    return lambda: progress and progress("passes", next(done), total)
