"""The verb ``dofla fade``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.options import Device, Dtype, KeepSoftmax, ModelArgument, Out, Seed
from dofla.cli.verb import current_view


def fade(
    model: ModelArgument,
    out: Out,
    budget: Annotated[int, typer.Option(help="Bytes, as so many features per KV head.")] = 64,
    data: Annotated[
        str, typer.Option(help="Text to measure on, as for dofla profile; default the model's own samples.")
    ] = "self",
    shares: Annotated[
        str,
        typer.Option(help="Of the bytes, by KV head: measured, on the same text; even; or a file that was measured."),
    ] = "measured",
    windows: Annotated[int, typer.Option(help="Windows of it.")] = 12,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    reach: Annotated[
        int | None, typer.Option(help="Positions that the memory is for; default all that the model has.")
    ] = None,
    retrieval_heads: Annotated[
        int,
        typer.Option(help="KV heads that hold every token, those that facts are looked up with; text pays for them."),
    ] = 0,
    keep_softmax: KeepSoftmax = None,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Give a model a memory that fades, at once: no training."""
    from dofla.distillation.fading import WAYS
    from dofla.distillation.fading import fade as make
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.surgery import plan_of
    from dofla.plans.shares import Shares, named
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder

    view = current_view()
    with new_folder(out) as folder:
        student, tokenizer = load_teacher(model, dtype, device=device)
        tokens = windows_of(DataSpec(data, length, windows), student, tokenizer, seed=seed, view=view)
        with view.progress("fade") as bar:
            known = shares if shares in WAYS else Shares.load(shares)
            make(
                student,
                tokens,
                budget=budget,
                shares=known,
                keep_softmax=keep_softmax or (),
                reach=reach,
                retrieval_heads=retrieval_heads,
                tokenizer=tokenizer,
                progress=bar.stage,
            )
        write_adapter(student, folder)
        tokenizer.save_pretrained(folder)
    warn_of_local_base(student, out)
    plan = plan_of(student)
    view.show(plan)
    if whole := plan.made_by.get("retrieval_heads"):
        view.say(named(whole))
    view.say(f"\nadapter written to {out}")
    return {"adapter": out, "state_bytes": plan.state_bytes(student.dtype), **plan.to_dict()}
