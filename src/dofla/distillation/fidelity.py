"""Fidelity of each layer: the difference from the softmax attention it replaces, on the teacher's own inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dofla.attention import accumulable
from dofla.data import Images, TokenWindows, batches, counted
from dofla.distillation.losses import divergence, log_kernel_errors, student_log_scores
from dofla.integration.converted import Converted
from dofla.integration.recorder import AttentionCall, recording, run_body

ROWS = 128
"""Query rows per window whose attention is compared."""


@dataclass(frozen=True)
class LayerFidelity:
    """The difference between a layer's attention and the softmax attention it replaces.

    Attributes:
        output_error: root mean square difference of the attention outputs, relative to the root mean square of the
            teacher's.
        kl: of layers with feature maps, mean KL(teacher ‖ student) of attention rows, nats. (A compressed cache does
            not see some tokens at all.)
        head_kl: that of each KV head's queries.
        kernel_error: likewise, the error of the kernel exp(scaling · q·k), not normalized, relative to its own; the
            geometric mean over heads, as some heads' kernels are missed by orders of magnitude.
    """

    output_error: float
    kl: float | None = None
    head_kl: list[float] | None = None
    kernel_error: float | None = None


@torch.no_grad()
def attention_fidelity(
    student: Converted,
    windows: TokenWindows | Images,
    *,
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, LayerFidelity]:
    """Per layer, by name, over all windows; ``progress`` is called with (done, total) batches."""
    layers, model = student.layers, student.model
    generator = torch.Generator().manual_seed(seed)
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in layers}  # Σ error², Σ output²
    divergences: dict[str, Any] = dict.fromkeys(layers, 0.0)  # Σ kl per KV head [Hkv]
    row_counts = dict.fromkeys(layers, 0.0)  # per KV head
    kernels: dict[str, Tensor] = {}  # log Σ (K − K̂)² and log Σ K² [2, H]

    def compare(call: AttentionCall) -> None:
        layer, rows = layers[call.name], call.random_rows(ROWS, generator)
        real, share = call.real_rows(rows)[:, None, :], call.query.shape[1] // call.value.shape[1]
        teacher = call.log_weights(rows)
        exact = teacher.exp() @ accumulable(call.value).repeat_interleave(share, dim=1) * real.unsqueeze(-1)
        error = (accumulable(call.run(layer)[:, :, rows]) - exact) * real.unsqueeze(-1)
        sums[call.name] += torch.stack([error.square().sum(), exact.square().sum()]).double().cpu()
        if layer.compressed is not None:
            return
        approximate = student_log_scores(call, layer, rows)
        kl = divergence(teacher, torch.log_softmax(approximate, dim=-1))
        divergences[call.name] += (kl * real).sum((0, 2)).unflatten(0, (-1, share)).sum(1).double().cpu()
        row_counts[call.name] += real.sum().item() * share
        kernel = torch.stack(log_kernel_errors(call, approximate, rows)).double().cpu()
        kernels[call.name] = torch.logaddexp(kernels[call.name], kernel) if call.name in kernels else kernel

    with recording(model, layers, compare):
        for part in counted(batches(windows, batch_size), progress):
            run_body(model, windows.batch(part))
    found = {}
    for name, (error, square) in sums.items():
        output_error = (error / square).sqrt().item()
        if name not in kernels:
            found[name] = LayerFidelity(output_error)
            continue
        mean, kernel = divergences[name].mean().item() / row_counts[name], kernels[name]
        kernel_error = ((kernel[0] - kernel[1]) / 2).mean().exp().item()
        found[name] = LayerFidelity(output_error, mean, (divergences[name] / row_counts[name]).tolist(), kernel_error)
    return found
