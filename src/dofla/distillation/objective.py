"""The loss of a whole student against its teacher on a batch: next-token distributions, or an encoder's embeddings."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dofla.data import predicted
from dofla.integration.offload import device_of
from dofla.integration.recorder import fed, mean_pooled, run_body

POSITIONS_AT_A_TIME = 128
"""Positions whose vocabularies of logits, of teacher and student, are in memory together."""
NEXT_TOKEN, EMBEDDING = "kl", "embedding"


class Objective:
    """The loss of a whole student, which computes what the teacher does within the block of ``teacher``.

    ``kl`` (models that generate) is KL(teacher ‖ student) of the next-token distributions in nats, mean over the real
    tokens predicted. ``embedding`` (all others) is the squared
    error of the last hidden states over their teacher's variance in the batch, mean over real tokens, plus 1 − the
    cosine of the mean-pooled states, mean over windows.
    """

    def __init__(self, student: PreTrainedModel, teacher: Callable[[], AbstractContextManager]) -> None:
        self.student, self.teacher = student, teacher
        self.name = NEXT_TOKEN if student.can_generate() else EMBEDDING
        self.head_apart = self.name == NEXT_TOKEN and _head_stands_apart(student)

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Real tokens of a batch that the mean is over (an encoder's windows, where none is padded: all are alike)."""
        if self.name == NEXT_TOKEN:
            return int(predicted(batch).sum())
        return int(batch["attention_mask"].sum()) if "attention_mask" in batch else len(next(iter(batch.values())))

    @torch.no_grad()
    def read_teacher(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The teacher's hidden states [B, L, d], or, unless ``head_apart``, its logits [B, L, V]."""
        with self.teacher():
            return self._read(batch)

    def __call__(self, batch: Mapping[str, Tensor], tokens: int, windows: int, theirs: Tensor | None = None) -> Tensor:
        """The batch's part of the loss of a step that has ``tokens`` real ones (:meth:`count`) in ``windows``;
        ``theirs`` is what :meth:`read_teacher` gives of it, where it has been asked."""
        theirs = self.read_teacher(batch) if theirs is None else theirs
        ours = self._read(batch)
        if self.name == NEXT_TOKEN:
            return self._divergence(ours, theirs, predicted(batch).bool()) / max(tokens, 1)
        mask = batch.get("attention_mask", torch.ones(ours.shape[:2], device=ours.device))
        error = relative_error(ours[mask.bool()], theirs[mask.bool()]) * self.count(batch) / tokens
        cosine = (mean_pooled(ours, mask) * mean_pooled(theirs, mask)).sum(dim=-1)
        return error + (1 - cosine).sum() / windows

    def _read(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Hidden states [B, L, d], or logits [B, L, V] where the head cannot be applied to some positions alone."""
        if self.name == EMBEDDING:
            return run_body(self.student, batch)["last_hidden_state"].float()
        if self.head_apart:
            return run_body(self.student, batch)["last_hidden_state"]
        return self.student(**fed(self.student, batch), use_cache=False).logits

    def _divergence(self, ours: Tensor, theirs: Tensor, real: Tensor) -> Tensor:
        """KL summed over the positions [B, L - 1] that predict a real token."""
        real = real.to(ours.device)
        ours, theirs = ours[:, :-1][real], theirs[:, :-1][real]
        total = ours.float().sum() * 0.0  # a graph, even if nothing is predicted
        # The logits of a slice are made again for its gradient, so that no more than one slice of them ever exists.
        for part in zip(ours.split(POSITIONS_AT_A_TIME), theirs.split(POSITIONS_AT_A_TIME), strict=True):
            total = total + checkpoint(self._divergence_of_slice, *part, use_reentrant=False, preserve_rng_state=False)
        return total

    def _divergence_of_slice(self, ours: Tensor, theirs: Tensor) -> Tensor:
        if self.head_apart:
            head = self.student.get_output_embeddings()
            ours, theirs = head(ours), head(theirs)
        ours, theirs = (torch.log_softmax(x, dim=-1, dtype=torch.float32) for x in (ours, theirs))
        return F.kl_div(ours, theirs, log_target=True, reduction="sum")


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Squared difference of vectors [N, d] over the variance of ``theirs``."""
    return (ours - theirs).square().mean() / (theirs - theirs.mean(dim=0)).square().mean()


@torch.no_grad()
def _head_stands_apart(student: PreTrainedModel) -> bool:
    """True if the logits are the output layer of the last hidden states and nothing else, found out on a few tokens:
    some families have more layers in their head, or scale what comes out."""
    head = student.get_output_embeddings()
    if head is None:
        return False
    ids = torch.arange(8, device=device_of(student)).unsqueeze(0) % student.config.get_text_config().vocab_size
    batch = {"input_ids": ids}
    hidden = getattr(run_body(student, batch), "last_hidden_state", None)
    if hidden is None or hidden.shape[-1] != head.weight.shape[1]:
        return False
    logits = student(**fed(student, batch), use_cache=False).logits
    return torch.allclose(head(hidden), logits, rtol=1e-3, atol=1e-4)
