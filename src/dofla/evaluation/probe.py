"""Positions, generation, recall and passkeys of a student in one record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.errors import DoflaError
from dofla.evaluation.generation import check_room, generation_figures
from dofla.evaluation.passkey import passkey_figures
from dofla.evaluation.position import loss_by_position
from dofla.evaluation.recall import RecallText, WordPairs, recall_figures
from dofla.integration.sites import evaluation_mode
from dofla.integration.surgery import describe, plan_of

PROBES = ("positions", "generation", "recall", "passkey")


def probe(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    windows: TokenWindows,
    *,
    wanted: Collection[str] = PROBES,
    recall_text: RecallText | None = None,
    lengths: Sequence[int] = (128, 256, 512),
    count: int = 32,
    prompts: int = 32,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch_size: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """What a student can still do with its context, beside the softmax model it was.

    Args:
        student: a linearised causal language model; it is its own teacher.
        tokenizer: the model's.
        windows: held-out text, for ``positions`` and ``generation``.
        wanted: some of :data:`PROBES`.
        recall_text: source of the recall prompts; default :class:`dofla.evaluation.recall.WordPairs`.
        lengths: tokens of the prompts of ``recall`` and ``passkey``.
        count: prompts of ``recall`` per length, and of ``passkey`` per length and depth.
        prompts: continuations of ``generation``.
        prompt_tokens: tokens of a prompt of ``generation``.
        new_tokens: tokens of a continuation.
        batch_size: windows or prompts per forward pass.
        seed: of everything random.
        progress: called with (done, total) batches, anew for each probe.

    Returns:
        ``model``, ``strategy``, ``source`` and ``seed``; and, as far as wanted, ``positions``
        (:func:`dofla.evaluation.loss_by_position`), ``generation`` (:func:`dofla.evaluation.generation_figures`),
        ``recall`` (``text``, the name of its source, and ``records``, see :func:`dofla.evaluation.recall_figures`) and
        ``passkey`` (``records``, see :func:`dofla.evaluation.passkey_figures`).

    Raises:
        DoflaError: if nothing known is wanted, or the model is no linearised causal language model; and what the
            parts raise.
    """
    unknown = sorted(set(wanted) - set(PROBES))
    if unknown or not wanted:
        raise DoflaError(f"wanted: {', '.join(unknown) or 'nothing'}; choose from {', '.join(PROBES)}")
    strategy = plan_of(student).made_by.get("strategy")
    check_room(student, windows.length)
    record: dict[str, Any] = {"model": describe(student), "strategy": strategy, "source": windows.source, "seed": seed}
    options = {"batch_size": batch_size, "progress": progress}
    with evaluation_mode(student):
        if "positions" in wanted:
            record["positions"] = loss_by_position(student, windows, **options)
        if "generation" in wanted:
            sizes = {"prompts": prompts, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
            record["generation"] = generation_figures(student, windows, seed=seed, **sizes, **options)
        sizes = {"lengths": lengths, "count": count, "seed": seed}
        if "recall" in wanted:
            text = recall_text or WordPairs(tokenizer)
            records = recall_figures(student, text, **sizes, **options)
            record["recall"] = {"text": text.name, "records": records}
        if "passkey" in wanted:
            record["passkey"] = {"records": passkey_figures(student, tokenizer, **sizes, **options)}
    return record
