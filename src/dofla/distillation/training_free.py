"""Training-free compression of a model's KV cache, and the measuring of head budgets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import count

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.display import Bar, reports_progress
from dofla.distillation.compressor import Compressor
from dofla.errors import DoflaError
from dofla.integration.surgery import tried
from dofla.integration.wrapped import unwraps_its_model
from dofla.plans.head_budgets import HeadBudgets
from dofla.storage.defaults import with_torchs_defaults

WAYS = ("measured", "even")
"""Named head budgets."""


@unwraps_its_model
@with_torchs_defaults
def measure_head_budgets(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    size: str | int | None = None,
    *,
    ratio: float | None = None,
    context: int | None = None,
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    progress: Callable[[str, int, int], None] | bool = True,
) -> HeadBudgets:
    """Measure how many bytes of a compressed cache each KV head should get; :func:`dofla.compress` takes the result.

    Each half of the windows is held out once: budgets measured on the other half are compared on it with even ones.
    Where even budgets are better, even budgets are returned.

    Args:
        model: as for :func:`dofla.compress`; it is compressed while measuring, and restored.
        windows: a dozen calibration windows of any text.
        size, ratio: of the compressed cache, as for :func:`dofla.compress`; a smaller one is measured where a cache of
            that size would hold more than a quarter of a window.
        context, retrieval_heads, tokenizer: as for :func:`dofla.compress`.
        keep_softmax: layers to leave out.
        batch_size: windows per pass, forward and backward; repeated text is read in as many tokens per pass, but at
            least one document of up to 2,048.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Raises:
        DoflaError: as :func:`dofla.compress`; a model that predicts no tokens, or is offloaded.
    """
    compressor = Compressor(
        model,
        windows,
        keep_softmax=keep_softmax,
        batch_size=batch_size,
        context=context,
        retrieval_heads=retrieval_heads,
        tokenizer=tokenizer,
    )
    return _measured(compressor, compressor.budget(size, ratio), progress=progress)


@unwraps_its_model
@with_torchs_defaults
def compress(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor],
    size: str | int | None = None,
    *,
    ratio: float | None = None,
    context: int | None = None,
    head_budgets: HeadBudgets | str = "measured",
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_softmax: Collection[str] = (),
    batch_size: int = 1,
    prefill: str = "auto",
    progress: Callable[[str, int, int], None] | bool = True,
) -> PreTrainedModel:
    """Give a causal model a compressed cache of constant size, in place and without training: recent tokens in int8,
    older ones in 3 bits, eviction by attention score.

    Args:
        model: any causal model that :func:`dofla.linearize` takes.
        windows: a dozen calibration windows of any text: head budgets, and the means and directions of keys and values
            are measured on them.
        size: bytes of the compressed cache per sequence, all compressed layers together: text with a unit
            (``"1.5MiB"``, ``"800KiB"``, ``"1GiB"``, decimal ``"2MB"``), or an int.
        ratio: the size, as a compression factor: bytes of the bfloat16 cache of these layers at ``context`` tokens over
            those of the compressed cache. Give one of the two; default a ratio of 16.
        context: the context length, in tokens, that the cache is calibrated for: windows are read at positions spread
            over it, and no KV head gets slots for more tokens. Default all positions of the model; windows are moved
            where positions are rotary. A shorter context is a little better within, and much worse beyond.
        head_budgets: how the bytes are divided among KV heads: ``measured``, by :func:`dofla.measure_head_budgets` on
            the same windows; ``even``, which takes no gradients and a tenth of the time; or measured ones.
        retrieval_heads: how many KV heads hold all ``context`` tokens: those that needle retrieval depends on most,
            measured on needles in the windows' text. It improves recall; the other heads get fewer bytes.
        tokenizer: the model's, which writes the needles; needed for retrieval heads only.
        keep_softmax: layers to leave as they are.
        batch_size: windows per pass.
        prefill: how a prompt is read into the cache. ``exact``: its tokens attend exactly to one another, and those to
            retain are selected at the end of each call, by the attention of all its queries. ``stream``: token by
            token, as decoding and :func:`dofla.evaluate` go on. ``auto``: exact on a GPU, where it is faster, else
            stream.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: as :func:`dofla.linearize`, before minutes are spent on measuring; an encoder, which keeps nothing
            from token to token; a size too small for a token of each kind, or for so many retrieval heads; ``size`` and
            ``ratio`` together; heads whose size is no multiple of 8; as :func:`dofla.measure_head_budgets`.
    """
    if not isinstance(head_budgets, HeadBudgets) and head_budgets not in WAYS:
        raise DoflaError(
            f"head_budgets is {head_budgets!r}: give {', '.join(WAYS)}, or the result of dofla.measure_head_budgets"
        )
    if retrieval_heads and head_budgets != "measured":
        raise DoflaError(
            f"retrieval_heads is {retrieval_heads}: they are found when head budgets are measured, "
            "so leave head_budgets out, or give the result of dofla.measure_head_budgets with them"
        )
    compressor = Compressor(
        model,
        windows,
        keep_softmax=keep_softmax,
        batch_size=batch_size,
        context=context,
        retrieval_heads=retrieval_heads,
        tokenizer=tokenizer,
        prefill=prefill,
    )
    return _made(compressor, compressor.budget(size, ratio), head_budgets, progress=progress)


@reports_progress("compress", Bar.stage)
def _made(
    compressor: Compressor,
    budget: float,
    head_budgets: HeadBudgets | str,
    *,
    progress: Callable[[str, int, int], None] | bool,
) -> PreTrainedModel:
    if head_budgets == "measured":
        return compressor.make(budget, _measured(compressor, budget, progress=progress))
    given = head_budgets if isinstance(head_budgets, HeadBudgets) else None
    compressor.plan(budget, given)  # its errors come first
    compressor.measure_directions(partial(progress, "directions") if callable(progress) else None)
    return tried(compressor.make(budget, given))


@reports_progress("head budgets", Bar.stage)
def _measured(
    compressor: Compressor, budget: float, *, progress: Callable[[str, int, int], None] | bool
) -> HeadBudgets:
    report = progress if callable(progress) else None
    compressor.check_head_budgets(budget)
    compressor.measure_directions(report and partial(report, "directions"))
    compressor.check_consistency(budget)
    done, total = count(1), compressor.passes
    return compressor.head_budgets(budget, lambda: report and report("head budgets", next(done), total))
