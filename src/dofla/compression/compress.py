"""Giving a model a compressed KV cache, in place and without training."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dofla.compression.calibrate import HEAD_BUDGETS, measure
from dofla.compression.calibration import Calibration
from dofla.compression.directions import default_cut
from dofla.compression.head_budgets import LEAST, HeadBudgets
from dofla.compression.known import BASE, keep, known
from dofla.compression.plan import compressed_plan
from dofla.compression.retrieval import by_layer, check_retrieval_heads, has_words
from dofla.compression.target import Target
from dofla.data import TokenWindows
from dofla.display import Bar, reports_progress
from dofla.errors import DoflaError, check_choice
from dofla.integration.converted import Converted
from dofla.integration.self_samples import token_windows
from dofla.integration.surgery import convert, restore, tried
from dofla.integration.wrapped import unwraps_its_model
from dofla.plans.plan import check_prefill
from dofla.storage.defaults import with_torchs_defaults

logger = logging.getLogger(__name__)

TEXT = "sample"
"""The source of the text that models are calibrated on by default: it comes with dofla."""


@unwraps_its_model
@with_torchs_defaults
@reports_progress("compress", Bar.stage)
def compress(
    model: PreTrainedModel,
    windows: TokenWindows | Tensor | Mapping[str, Tensor] | None = None,
    size: str | int | None = None,
    *,
    ratio: float | None = None,
    calibration: Calibration | str | Path | None = None,
    context: int | None = None,
    head_budgets: str = "measured",
    retrieval_heads: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep_softmax: Collection[str] | None = (),
    batch_size: int = 1,
    prefill: str = "auto",
    progress: Callable[[str, int, int], None] | bool = True,
) -> PreTrainedModel:
    """Give a causal model a compressed cache of constant size, in place and without training: recent tokens in int8,
    older ones in 3 bits, eviction by attention score.

    Args:
        model: any causal model whose attention goes through transformers' attention interface.
        windows: text to calibrate on (:func:`dofla.calibrate`). Without windows and calibration, one that was made
            before of the same weights is used: this user's, one that comes with dofla, or one of the hub. Where there
            is none, the model is calibrated on the text that comes with dofla, and that is kept for this user.
        size: bytes of the compressed cache per sequence, all compressed layers together: text with a unit
            (``"1.5MiB"``, ``"800KiB"``, ``"1GiB"``, decimal ``"2MB"``), or an int.
        ratio: the size, as a compression factor: bytes of the bfloat16 cache of these layers at ``context`` tokens over
            those of the compressed cache. Give one of the two; default a ratio of 16.
        calibration: what :func:`dofla.calibrate` measured of the model, or the file it was saved to; or ``base``, the
            one that was made before of a model with the same shapes, whatever its weights: for fine-tuned models.
        context: the context length, in tokens, that the cache is for: windows are read at positions spread over it, and
            no KV head gets slots for more tokens. Default all positions of the model; windows are moved where positions
            are rotary. A shorter context is a little better within, and much worse beyond.
        head_budgets: how the bytes are divided among KV heads: ``measured``, by the error of eviction in each; or
            ``even``.
        retrieval_heads: how many KV heads hold all ``context`` tokens: those that needle retrieval depends on most, as
            in DuoAttention (Xiao et al. 2024, arXiv 2410.10819). It improves recall; the other heads get fewer bytes.
        tokenizer: the model's, to calibrate for retrieval heads, for which it writes needles, or without windows; there
            the one beside the model's weights by default.
        keep_softmax: layers to leave as they are.
        batch_size: windows per pass.
        prefill: how a prompt is read into the cache. ``exact``: its tokens attend exactly to one another, and those to
            retain are selected at the end of each call, by the attention of all its queries. ``sequential``: token by
            token, as decoding and :func:`dofla.evaluate` go on. ``auto``: exact on a GPU, where it is faster, else
            sequential.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) as by :func:`dofla.calibrate`.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: before minutes are spent on measuring: a model that cannot be compressed; an encoder, which keeps
            nothing from token to token; a size too small for a token of each kind, or for so many retrieval heads;
            ``size`` and ``ratio`` together; heads whose size is no multiple of 8; a calibration of another model; as
            :func:`dofla.calibrate`.
    """
    target = Target.of(model, context, keep_softmax)
    total = target.size(size, ratio)
    if calibration is None and windows is None:
        calibration = known(target)
    elif calibration == BASE:
        if (calibration := known(target, base=True)) is None:
            raise DoflaError(f"calibration is {BASE!r}: none of a model with the shapes of {target.name} was found")
    elif isinstance(calibration, (str, Path)):
        calibration = Calibration.load(calibration)
    by_default = calibration is None and windows is None
    if by_default:
        tokenizer = tokenizer or tokenizer_of(model)
    check_fit(target, total, calibration, head_budgets, retrieval_heads, prefill, tokenizer is not None)
    if calibration is None:
        if windows is None:
            assert tokenizer is not None
            windows = default_windows(tokenizer, target.length)
        budgets = "measured" if by_default else head_budgets
        ranking = tokenizer if retrieval_heads or (by_default and has_words(tokenizer)) else None
        calibration = measure(model, target, windows, budgets, ranking, batch_size, progress)
        if by_default and context is None and not keep_softmax:
            logger.info("the calibration is kept in %s", keep(calibration))
    else:
        calibration.check(target)
    if head_budgets == "even":
        calibration = replace(calibration, shares={})
    return tried(with_calibration(model, target, calibration, total, retrieval_heads, prefill))


def default_windows(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> TokenWindows:
    """Windows of the text that comes with dofla, for a model with so many positions."""
    return token_windows(TEXT, tokenizer, **default_cut(positions))


def tokenizer_of(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights of a model; DoflaError if there is none."""
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise DoflaError(
            f"{model.name_or_path or type(model).__name__} has no tokenizer to calibrate with: give the tokenizer, "
            "windows of text, or a calibration"
        ) from error


def with_calibration(
    model: PreTrainedModel,
    target: Target,
    calibration: Calibration,
    size: int,
    retrieval_heads: int = 0,
    prefill: str = "auto",
) -> PreTrainedModel:
    """The model compressed to so many bytes, in place and untried."""
    plan = compressed_plan(target, size, head_budgets=calibration.head_budgets(retrieval_heads), prefill=prefill)
    converted = Converted.of(convert(model, plan, sites=target.sites))
    converted.record.add_calibration(calibration.made_by)
    try:
        calibration.apply(converted)
    except BaseException:
        restore(model)
        raise
    return model


def check_fit(
    target: Target,
    size: int,
    calibration: Calibration | None = None,
    head_budgets: str = "measured",
    retrieval_heads: int = 0,
    prefill: str = "auto",
    has_tokenizer: bool = True,
) -> None:
    """DoflaError for a size that is too small, whatever the head budgets turn out to be; or retrieval heads that will
    not be found or have no room."""
    check_prefill(prefill)
    check_choice("head_budgets", head_budgets, HEAD_BUDGETS)
    sites = target.compressed
    heads = [(site.name, head) for site in sites for head in range(site.kv_heads)]
    ranked = calibration is not None and bool(calibration.retrieval)
    check_retrieval_heads(retrieval_heads, len(heads), ranked or has_tokenizer)
    if retrieval_heads and not ranked and calibration is not None:
        raise DoflaError(
            f"retrieval_heads is {retrieval_heads}, and the calibration ranks none: calibrate with the tokenizer "
            "(dofla calibrate --retrieval-heads)"
        )
    if calibration is None:
        least = LEAST if head_budgets == "measured" else 1.0
        for share, full in ((least, 0), (1.0, retrieval_heads)):
            budgets = HeadBudgets({x.name: [share] * x.kv_heads for x in sites}, by_layer(heads[:full]))
            compressed_plan(target, size, head_budgets=budgets)
