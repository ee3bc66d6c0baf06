"""How close each layer's attention is to the one it replaces, on the teacher's own inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, batches
from dofla.distill.losses import attention_kl, log_kernel_errors
from dofla.integration.recorder import AttentionCall, recording, run_body
from dofla.integration.surgery import linear_layers

ROWS = 128
"""Query rows per window whose attention is compared."""


@torch.no_grad()
def attention_fidelity(
    student: PreTrainedModel, windows: TokenWindows | Images, *, batch_size: int = 4, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Per layer, over all windows, ``kl``, ``output_error`` and ``kernel_error``.

    ``kl`` is the mean KL(teacher ‖ student) of attention rows in nats. ``output_error`` is the root mean square
    difference of the attention outputs, relative to the root mean square of the teacher's. ``kernel_error`` is that of
    the kernel exp(scaling · q·k), not normalised, relative to its own, and the geometric mean over heads, as some
    heads' kernels are missed by orders of magnitude.
    """
    layers = linear_layers(student)
    generator = torch.Generator().manual_seed(seed)
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in layers}  # Σ kl, rows, Σ error², Σ output²
    kernels: dict[str, Tensor] = {}  # log Σ (K − K̂)² and log Σ K² [2, H]

    def compare(call: AttentionCall) -> None:
        rows = call.random_rows(ROWS, generator)
        real = call.real_rows(rows)[:, None, :]
        kl = attention_kl(call, call, layers[call.name], rows)
        teacher = call.log_weights(rows).exp()
        values = call.value.float().repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        exact = teacher @ values
        options = {"scaling": call.scaling, "weight": call.weight, "causal": call.causal}
        out, _ = layers[call.name](call.query, call.key, call.value, **options)
        error = (out[:, :, rows].float() - exact) * real.unsqueeze(-1)
        exact = exact * real.unsqueeze(-1)
        sums[call.name] += (
            torch.stack([(kl * real).sum(), real.sum() * kl.shape[1], error.square().sum(), exact.square().sum()])
            .double()
            .cpu()
        )
        kernel = torch.stack(log_kernel_errors(call, call, layers[call.name], rows)).double().cpu()
        kernels[call.name] = torch.logaddexp(kernels[call.name], kernel) if call.name in kernels else kernel

    with recording(student, layers, compare):
        for part in batches(windows, batch_size):
            run_body(student, windows.batch(part))
    return {
        name: {
            "kl": (s[0] / s[1]).item(),
            "output_error": (s[2] / s[3]).sqrt().item(),
            "kernel_error": ((kernels[name][0] - kernels[name][1]) / 2).mean().exp().item(),
        }
        for name, s in sums.items()
    }
