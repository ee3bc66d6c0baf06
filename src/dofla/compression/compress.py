"""Giving a model a compressed KV cache, in place and without training."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.compression.calibrate import HEAD_BUDGETS, measure
from dofla.compression.calibration import Calibration
from dofla.compression.directions import default_cut
from dofla.compression.head_budgets import LEAST_OF_ALL, HeadBudgets
from dofla.compression.known import BASE, cache_folder, keep, known
from dofla.compression.plan import BITS, compressed_plan
from dofla.compression.retrieval import AUTO, by_layer
from dofla.compression.target import Target, tokenizer_of
from dofla.data import TokenWindows
from dofla.display import Bar
from dofla.errors import DoflaError, check_choice
from dofla.integration.second_reading import check_reads_twice
from dofla.integration.self_samples import token_windows
from dofla.integration.surgery import tried
from dofla.integration.wrapped import takes_model
from dofla.plans.plan import check_prefill

logger = logging.getLogger(__name__)

TEXT = "sample"
"""The source of the text that models are calibrated on by default: it comes with dofla."""


@takes_model("compress", Bar.stage)
def compress(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor] | None = None,
    size: str | int | None = None,
    *,
    ratio: float | None = None,
    calibration: Calibration | str | Path | None = None,
    context: int | None = None,
    head_budgets: str = "measured",
    retrieval_heads: int | str = AUTO,
    evict: bool = True,
    bits: float = BITS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_softmax: Collection[str] | None = (),
    batch_size: int = 1,
    prefill: str = "exact",
    progress: Callable[[str, int, int], None] | bool = True,
) -> PreTrainedModel:
    """Give a causal model a compressed cache, in place and without training: recent tokens in int8, older ones in 3
    bits, eviction by attention score. A few heads, with which models find facts again, hold every token; all others
    take a constant size.

    Args:
        model: any causal model whose attention goes through transformers' attention interface.
        windows: text to calibrate on (:func:`dofla.calibrate`). Without windows and calibration, one that was made
            before of the same weights is used: this user's, one that comes with dofla, or one of the hub. Where there
            is none, the model is calibrated on the text that comes with dofla, and that is kept for this user.
        size: bytes of the compressed cache per sequence that do not grow, all compressed layers together: text with a
            unit (``"1.5MiB"``, ``"800KiB"``, ``"1GiB"``, decimal ``"2MB"``), or an int.
        ratio: the size, as a compression factor: bytes of the bfloat16 cache of these layers at ``context`` tokens over
            those of the compressed cache. Give one of the two; default a ratio of 16.
        calibration: in the place of windows, what :func:`dofla.calibrate` measured of the model, or the file it was
            saved to; or ``base``, the one that was made before of a model with the same shapes, whatever its weights:
            for fine-tuned models.
        context: the context length, in tokens, that the cache is for: windows are read at positions spread over it, and
            no KV head of constant size gets slots for more tokens. Default all positions of the model; windows are
            moved where positions are rotary. A shorter context is a little better within, and much worse beyond.
        head_budgets: how the bytes are divided among KV heads: ``measured``, by the error of eviction in each; or
            ``even``.
        retrieval_heads: how many KV heads hold every token, in slots that grow with the sequence: those that needle
            retrieval depends on most, as in DuoAttention (Xiao et al. 2024, arXiv 2410.10819). By default as many as
            attend to needles (:func:`dofla.compression.retrieval.count_of`), none where the calibration ranks none;
            0 for a cache of constant size.
        evict: False for a cache in which no head evicts a token: it grows, in few bits, and takes no size.
        bits: per number of older tokens, 1 to 5.
        tokenizer: the model's, by which needles are written while it is calibrated; default the one beside the model's
            weights.
        keep_softmax: layers to leave as they are.
        batch_size: windows per pass.
        prefill: how a prompt is read into the cache. ``exact``: its tokens attend exactly to one another, and those to
            retain are selected at the end of each call, by importance that is predicted from what layers read, or by
            the attention of all queries where the calibration is older. ``sequential``: token by token, as decoding and
            :func:`dofla.evaluate` go on, so that it does not matter how a text is cut into calls. ``twice``: a prompt
            that begins a sequence is read twice by softmax attention, and tokens that the second time attends to are
            retained. Reading takes up to three times softmax attention's time.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) as by :func:`dofla.calibrate`.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: before minutes are spent on measuring: a model that cannot be compressed; an encoder, which keeps
            nothing from token to token; a size too small for a token of each kind; ``size`` and ``ratio`` together, or
            one of them where nothing is evicted; heads whose size is no multiple of 8; a calibration of another
            model; as :func:`dofla.calibrate`.
    """
    if windows is not None and calibration is not None:
        raise DoflaError("windows and calibration are both given: give one of them")
    target = Target.of(model, context, keep_softmax)
    total = target.size(size, ratio, evict)
    if prefill == "twice":
        check_reads_twice(model)
        if not evict:
            raise DoflaError("prefill is 'twice' and evict is False: nothing is left to choose, take 'exact'")
    if calibration is None and windows is None:
        calibration = known(target)
    elif calibration == BASE:
        if (calibration := known(target, base=True)) is None:
            raise DoflaError(f"calibration is {BASE!r}: none of a model with the shapes of {target.name} was found")
    elif isinstance(calibration, (str, Path)):
        calibration = Calibration.load(calibration)
    by_default = calibration is None and windows is None
    if calibration is None and tokenizer is None and (by_default or retrieval_heads):
        tokenizer = tokenizer_of(model, needed=by_default)
    check_fit(target, total, calibration, head_budgets, retrieval_heads, prefill, tokenizer is not None, bits)
    if calibration is None:
        if windows is None:
            assert tokenizer is not None
            windows = default_windows(tokenizer, target.length)
        budgets = "measured" if by_default else head_budgets
        ranking, needed = tokenizer if by_default or retrieval_heads else None, retrieval_heads not in (0, AUTO)
        calibration = measure(model, target, windows, budgets, ranking, batch_size, progress, needed)
        if by_default and context is None and not keep_softmax:
            keep(calibration, cache_folder())
    else:
        calibration.check(target)
    if head_budgets == "even":
        calibration = replace(calibration, shares={})
    return tried(calibration.compress(model, target, total, retrieval_heads, prefill, bits))


def default_windows(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> TokenWindows:
    """Windows of the text that comes with dofla, for a model with so many positions."""
    return token_windows(TEXT, tokenizer, **default_cut(positions))


def check_fit(
    target: Target,
    size: int | None,
    calibration: Calibration | None = None,
    head_budgets: str = "measured",
    retrieval_heads: int | str = AUTO,
    prefill: str = "exact",
    has_tokenizer: bool = True,
    bits: float = BITS,
) -> None:
    """DoflaError for a size that is too small, whatever the head budgets turn out to be; or retrieval heads that will
    not be found or have no room."""
    check_prefill(prefill)
    check_choice("head_budgets", head_budgets, HEAD_BUDGETS)
    sites = target.compressed
    heads = [(site.name, head) for site in sites for head in range(site.kv_heads)]
    count = 0 if retrieval_heads == AUTO else retrieval_heads
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DoflaError(f"retrieval_heads is {count!r}: give how many KV heads are to hold every token, auto, or 0")
    if count > len(heads):
        raise DoflaError(f"retrieval_heads is {count}: the model has {len(heads)} KV heads")
    if count and calibration is not None and not calibration.retrieval:
        raise DoflaError(f"retrieval_heads is {count}, and the calibration ranks none: calibrate with the tokenizer")
    if count and calibration is None and not has_tokenizer:
        raise DoflaError(f"retrieval_heads is {count}: give the tokenizer too, which writes needles into the text")
    if calibration is None:
        # The last head has the least share that measuring may find.
        shares = {x.name: [1.0] * x.kv_heads for x in sites}
        if head_budgets == "measured":
            shares[sites[-1].name][-1] = LEAST_OF_ALL
        compressed_plan(target, size, head_budgets=HeadBudgets(shares, by_layer(heads[:count])), bits=bits)
