"""Measuring error curves: short fits of a few sizes, and what each head's error does to the model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dofla.data import Images, TokenWindows, as_windows
from dofla.display import Bar
from dofla.distillation.fidelity import attention_fidelity
from dofla.distillation.loop import distill
from dofla.errors import DoflaError, check_numbers
from dofla.integration.reading import windows_for
from dofla.integration.recorder import evaluation_mode, fed, run_body
from dofla.integration.surgery import answering, convert, describe, even_plan, original, restore
from dofla.integration.wrapped import takes_model
from dofla.plans.curves import Curves, LayerCurve, Point
from dofla.plans.hybrid import FEATURE_MAP, TOKEN_SHARE

LEVELS = (0.15, 0.4, 1.0, 2.5, 6.0)
"""Sizes that are tried, in budgets."""
OTHER_SHARES = (0.5, 0.9)
"""Shares of exact tokens that are tried beside :data:`dofla.plans.hybrid.TOKEN_SHARE`, at the smallest, middle and
largest size."""


@takes_model("error curves", Bar.stage)
def measure_curves(
    model: PreTrainedModel,
    windows: TokenWindows | Images | Tensor | Mapping[str, Tensor],
    budget: int = 64,
    *,
    feature_map: str = FEATURE_MAP,
    token_dtype: str | None = None,
    keep_softmax: Sequence[str] = (),
    steps: int = 25,
    batch_size: int = 2,
    rows: int = 64,
    held_out: int = 4,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | bool = True,
) -> Curves:
    """Measure the error of each KV head at several sizes, and its effect on the model; :func:`dofla.linear.allocate`
    with strategy ``measured`` spends the budget by these curves.

    For each size all layers are trained together for a few steps (:func:`dofla.linear.distill`), layer by layer as
    ever, and compared with softmax attention on windows held out. Then, at the middle size, each KV head alone is
    linear and all others softmax: the divergence of the model's next tokens (of an encoder, the relative squared error
    of its last hidden states) by the head's own error is its ``effect``. That takes a forward pass per head and
    held-out window.

    Args:
        model: the teacher; it is linearized in between, and restored.
        windows: the last ``held_out`` judge, the others train.
        budget: the middle of the sizes, in features per KV head.
        feature_map: of the students.
        token_dtype: how they keep exact tokens; default eight bits, but for an encoder.
        keep_softmax: layers to leave out.
        steps, batch_size, rows: of each short training.
        held_out: windows.
        seed: of the features and the training.
        progress: a bar by default, where there is a terminal or a notebook; False for none; or a function, which is
            called with (stage, done, total) after each size and each head.

    Raises:
        DoflaError: as :func:`dofla.linear.distill`; a budget or held-out windows below 1; too few windows.
    """
    report = progress if callable(progress) else None
    windows = windows_for(model, windows)
    if budget < 1:
        raise DoflaError(f"budget {budget} is too small for one feature per layer: give 1 or more")
    check_numbers(held_out=held_out)
    if len(windows) < held_out + batch_size:
        need = held_out + batch_size
        raise DoflaError(f"{len(windows)} windows are too few for error curves: give {need} or more")
    border = len(windows) - held_out
    training, judging = (as_windows(windows.batch(range(a, b))) for a, b in ((0, border), (border, len(windows))))
    grid = [(TOKEN_SHARE, level) for level in LEVELS]
    grid += [(share, level) for share in OTHER_SHARES for level in (LEVELS[0], 1.0, LEVELS[-1])]
    points: dict[str, list[Point]] = {}
    effects: dict[str, list[float]] = {}
    for done, (share, level) in enumerate(grid, start=1):
        size = max(1, level * budget)
        plan = even_plan(
            model, size, share=share, feature_map=feature_map, token_dtype=token_dtype, keep_softmax=keep_softmax
        )
        student = convert(model, plan, seed=seed)
        try:
            distill(model, training, loss="softmax", steps=steps, batch_size=batch_size, rows=rows, seed=seed)
            fidelity = attention_fidelity(student, judging, batch_size=batch_size, seed=seed)
            errors = {name: own.head_kl for name, own in fidelity.items() if own.head_kl is not None}
            if (share, level) == (TOKEN_SHARE, 1.0):
                effects = _effects(model, judging, errors, report)
        finally:
            restore(model)
        for name, found in errors.items():
            spent = plan[name].cache_bytes(0, model.dtype.itemsize) // plan[name].kv_heads
            points.setdefault(name, []).append(Point(share, spent, found))
        if report is not None:
            report("sizes", done, len(grid))
    token_dtype = plan.linear[0].token_dtype
    made_by = {"budget": budget, "feature_map": feature_map, "token_dtype": token_dtype}
    made_by |= {"steps": steps, "batch_size": batch_size, "rows": rows}
    made_by |= {"held_out": held_out, "seed": seed, "tokens": windows.tokens, "source": windows.source}
    layers = [LayerCurve(name, effects[name], found) for name, found in points.items()]
    return Curves(layers, describe(model)["name"], made_by)


@torch.no_grad()
def _effects(
    student: PreTrainedModel,
    windows: TokenWindows | Images,
    errors: Mapping[str, Sequence[float]],
    progress: Callable[[str, int, int], None] | None,
) -> dict[str, list[float]]:
    """The harm to the model when one KV head alone is linear, divided by that head's error; by layer and KV head."""
    harm = {(name, head): 0.0 for name, own in errors.items() for head in range(len(own))}
    with evaluation_mode(student):
        for n in range(len(windows)):
            batch = windows.batch(torch.tensor([n]))
            with original(student):
                wanted = _answer(student, batch)
            for done, (name, head) in enumerate(harm, start=1):
                with answering(student, {name: [head]}):
                    harm[name, head] += _harm(student, wanted, _answer(student, batch), batch) / len(windows)
                if progress:
                    progress("effects", n * len(harm) + done, len(windows) * len(harm))
    return {n: [harm[n, head] / max(error, 1e-9) for head, error in enumerate(own)] for n, own in errors.items()}


def _answer(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of the next token, or an encoder's last hidden states: [1, L, V or D]."""
    if not model.can_generate():
        return run_body(model, batch)["last_hidden_state"].float()
    logits = model(**fed(model, batch), use_cache=False).logits
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def _harm(model: PreTrainedModel, wanted: Tensor, found: Tensor, batch: Mapping[str, Tensor]) -> float:
    if "attention_mask" in batch:
        real = batch["attention_mask"].bool().to(wanted.device)
        wanted, found = wanted[real], found[real]
    if model.can_generate():
        return (wanted.exp() * (wanted - found)).sum(-1).mean().item()
    return ((wanted - found).square().sum() / wanted.square().sum()).item()
