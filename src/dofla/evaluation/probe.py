"""Positions, generation, recall and passkeys of a student in one result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dofla.data import TokenWindows
from dofla.display import Part, Result, reports_progress
from dofla.errors import DoflaError
from dofla.evaluation.generation import Generation, check_room, generation_figures
from dofla.evaluation.passkey import passkey_figures
from dofla.evaluation.position import Positions, loss_by_position
from dofla.evaluation.recall import Recall, RecallText, WordPairs, recall_figures
from dofla.integration.recorder import evaluation_mode
from dofla.integration.student import Student
from dofla.integration.surgery import describe

PROBES = ("positions", "generation", "recall", "passkey")


@dataclass(frozen=True)
class Probe(Result):
    """Figures of a student's use of its context; parts that were not wanted are None.

    Attributes:
        model: class, name and number of parameters.
        strategy: of the plan.
        source: of the windows.
        seed: of everything random.
        positions: loss by position.
        generation: continuations.
        recall: of what was told in the context.
        passkey: recall of a number in a long text.
    """

    model: dict[str, Any] = field(repr=False)
    strategy: str | None
    source: str
    seed: int
    positions: Positions | None = None
    generation: Generation | None = None
    recall: Recall | None = None
    passkey: Recall | None = None

    def parts(self) -> Iterator[Part]:
        """Titled tables."""
        for name in PROBES:
            if (found := getattr(self, name)) is not None:
                yield ""
                yield from found.parts()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; parts that were not wanted are left out."""
        data = {name: value for name, value in asdict(self).items() if name not in PROBES or value is not None}
        data.get("passkey", {}).pop("text", None)
        return data


@reports_progress("probe")
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
    progress: Callable[[int, int], None] | bool = True,
) -> Probe:
    """Measure what a student can still do with its context, beside the softmax model it was.

    Args:
        student: a linearized causal language model; it is its own teacher.
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
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (done, total) batches, anew for each probe.

    Returns:
        Figures that are fields, as far as wanted; ``print`` shows them as tables, ``to_dict()`` is for JSON.

    Raises:
        DoflaError: if nothing known is wanted, or the model is no linearized causal language model; and what the
            parts raise.
    """
    unknown = sorted(set(wanted) - set(PROBES))
    if unknown or not wanted:
        raise DoflaError(f"wanted: {', '.join(unknown) or 'nothing'}; choose from {', '.join(PROBES)}")
    strategy = Student.of(student).plan.made_by.get("strategy")
    check_room(student, windows.length)
    report = progress if callable(progress) else None
    positions = generation = recall = passkey = None
    with evaluation_mode(student):
        if "positions" in wanted:
            positions = loss_by_position(student, windows, batch_size=batch_size, progress=report)
        if "generation" in wanted:
            generation = generation_figures(
                student,
                windows,
                prompts=prompts,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                batch_size=batch_size,
                seed=seed,
                progress=report,
            )
        if "recall" in wanted:
            text = recall_text or WordPairs(tokenizer)
            recall = recall_figures(
                student, text, lengths=lengths, count=count, batch_size=batch_size, seed=seed, progress=report
            )
        if "passkey" in wanted:
            passkey = passkey_figures(
                student, tokenizer, lengths=lengths, count=count, batch_size=batch_size, seed=seed, progress=report
            )
    return Probe(describe(student), strategy, windows.source, seed, positions, generation, recall, passkey)
