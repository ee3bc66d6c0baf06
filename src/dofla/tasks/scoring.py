"""Log-likelihoods of a task's choices, by lm-evaluation-harness."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.errors import DoflaError
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.storage.extras import extra
from dofla.tasks.items import Task
from dofla.tasks.scores import TaskScores
from dofla.tasks.styles import STYLES, Request


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> TaskScores:
    """Log-likelihood of every choice of every item.

    Args:
        model: a causal language model, softmax or linear, as it stands; for a student's teacher call this within
            ``dofla.softmax(student)``.
        batch_size: choices per forward pass; the logits of all their tokens are held at one time.
        progress: called with (done, total) items.

    Raises:
        DoflaError: if lm-eval is not installed, the model is no causal language model, a choice has no tokens or more
            than the model reads, or a likelihood is not finite.
    """
    requests = [STYLES[task.style](item) for item in task.items]
    logprobs: list[list[float]] = []
    with evaluation_mode(model):
        lm = language_model(model, tokenizer, batch_size)
        rows = [[(request, *encode(lm, request, task.name)) for request in choices] for choices in requests]
        for begin in range(0, len(rows), batch_size):
            part = rows[begin : begin + batch_size]
            with quiet():
                found = iter(lm._loglikelihood_tokens([row for choices in part for row in choices], disable_tqdm=True))
            logprobs += [[next(found)[0] for _ in choices] for choices in part]
            if progress:
                progress(len(logprobs), len(rows))
    if not all(math.isfinite(value) for values in logprobs for value in values):
        raise DoflaError(f"task {task.name}: a log-likelihood is NaN or infinite: check the model's dtype and its maps")
    return TaskScores(
        task.name,
        [item.id for item in task.items],
        [item.answer for item in task.items],
        logprobs,
        [[request.characters for request in choices] for choices in requests],
    )


def language_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 1) -> Any:
    """The harness's HFLM of a model, which it puts into evaluation mode; its tokenizer is a copy that can pad."""
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(f"{type(model).__name__} cannot score choices: give a causal language model")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise DoflaError("the tokenizer has no bos or eos token to start an empty question from: set one")
    with quiet():
        return lm_eval("models.huggingface").HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=batch_size,
            max_length=positions_of(model),
            softmax_dtype="float32",
        )


def encode(lm: Any, request: Request, task: str) -> tuple[list[int], list[int]]:
    """Tokens of the context and of the continuation, split as the harness splits them.

    Args:
        lm: made by :func:`language_model`.
        task: name, for errors.

    Raises:
        DoflaError: if the continuation has no tokens, or more than the model reads.
    """
    if request.context.strip():
        given, asked = lm._encode_pair(*request)
    else:
        given, asked = [lm.prefix_token_id], lm.tok_encode("".join(request), add_special_tokens=False)
        if asked[:1] == given:  # the continuation spells out the start token
            asked = asked[1:]
    if not asked:
        raise DoflaError(
            f"task {task}: the choice {request.continuation!r} has no tokens of its own: give a longer one"
        )
    if len(asked) > lm.max_length:
        choice = f"the choice {request.continuation[:40]!r}... has {len(asked)} tokens"
        raise DoflaError(f"task {task}: {choice}, the model reads {lm.max_length}")
    return given, asked


def lm_eval(module: str) -> ModuleType:
    """A module of lm-evaluation-harness; DoflaError if that is not installed."""
    return extra(f"lm_eval.{module}", "eval", "scoring multiple-choice tasks")


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block the harness does not warn of models that it has not loaded itself, nor of each long question."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
