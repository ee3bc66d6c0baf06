"""A memory that fades, at once and without training, and how its bytes are best shared among KV heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import count

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.display import Bar, reports_progress
from dofla.distillation.faded import FadedStudents
from dofla.errors import DoflaError
from dofla.integration.surgery import tried
from dofla.integration.wrapped import unwraps_its_model
from dofla.plans.shares import Shares
from dofla.storage.defaults import with_torchs_defaults

WAYS = ("measured", "even")
"""How KV heads may share the bytes."""


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

    Each half of the windows is held out once, and shares measured on the other half are tried on it beside even ones.
    Where even ones are better, they are what is returned.

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
    options = {"keep_softmax": keep_softmax, "batch_size": batch_size, "reach": reach}
    options |= {"retrieval_heads": retrieval_heads, "tokenizer": tokenizer}
    return _measured(FadedStudents(model, tokens, **options), budget, progress=progress)


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
    progress: Callable[[str, int, int], None] | bool = True,
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
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each pass.

    Returns:
        ``model`` itself. :func:`dofla.restore` undoes it.

    Raises:
        DoflaError: as :func:`dofla.linearize`, before minutes are spent on shares; an encoder, which keeps nothing from
            token to token; a budget too small for a token of each kind, or for so many retrieval heads; heads whose
            size is no multiple of 8; as :func:`dofla.measure_shares`.
    """
    if not isinstance(shares, Shares) and shares not in WAYS:
        raise DoflaError(f"shares is {shares!r}: give {', '.join(WAYS)}, or what dofla.measure_shares returned")
    if retrieval_heads and shares != "measured":
        raise DoflaError(
            f"retrieval_heads is {retrieval_heads}: they are found when shares are measured, "
            "so leave shares out, or give what dofla.measure_shares returned with them"
        )
    options = {"keep_softmax": keep_softmax, "batch_size": batch_size, "reach": reach}
    options |= {"retrieval_heads": retrieval_heads, "tokenizer": tokenizer}
    return _made(FadedStudents(model, tokens, **options), budget, shares, progress=progress)


@reports_progress("fade", Bar.stage)
def _made(
    students: FadedStudents, budget: int, shares: Shares | str, *, progress: Callable[[str, int, int], None] | None
) -> PreTrainedModel:
    if shares == "measured":
        return students.make(budget, _measured(students, budget, progress=progress))
    students.plan(budget, shares if isinstance(shares, Shares) else None)  # what is wrong with it is said first
    students.measure_directions(progress and partial(progress, "directions"))
    return tried(students.make(budget, shares if isinstance(shares, Shares) else None))


@reports_progress("head budgets", Bar.stage)
def _measured(students: FadedStudents, budget: int, *, progress: Callable[[str, int, int], None] | None) -> Shares:
    students.check_shares(budget)
    students.measure_directions(progress and partial(progress, "directions"))
    students.check_consistency(budget)
    done, total = count(1), students.passes
    return students.shares(budget, lambda: progress and progress("head budgets", next(done), total))
