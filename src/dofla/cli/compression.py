"""The verbs of compression: check, calibrate, compress and frontier."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from dofla.cli.common import calibration_windows, carried, following, windows_from, written
from dofla.cli.options import (
    DATA,
    IN_MEMORY,
    ORIGINAL,
    Device,
    Given,
    ModelArgument,
    Ratio,
    SelfData,
    Size,
    existing,
    new_file,
    new_folder,
    source,
    text_of,
)
from dofla.cli.settings import Function
from dofla.cli.verb import No, current_view
from dofla.errors import DoflaError

_OF_CACHE = "context", "keep_softmax"
"""Settings that the next command must have as well."""


def check(
    model: ModelArgument,
    size: Annotated[list[str] | None, Option(help="Size of the compressed cache, as 1.5MiB; repeatable.")] = None,
    ratio: Ratio = None,
    settings: Given = Function("runs/check.py", "check", ("sizes",)),
) -> dict[str, Any]:
    """Say whether a model can be compressed, and what that saves.

    Reads its config, not its weights. Exits with 1 if it is not supported.
    """
    from dofla.runs.check import check as look

    found = look(model, size or (), ratio=ratio, **settings)
    current_view().show(found)
    if not found.supported:
        return No(found.to_dict())
    asked = ["--size", size[0]] if size else ["--ratio", f"{ratio or 16:g}"]
    following("compress", model, *asked, *carried(settings, _OF_CACHE), "--out", "compressed")
    return found.to_dict()


def calibrate(
    model: ModelArgument,
    data: SelfData = "sample",
    out: Annotated[Path, Option(help="File to write; it must be new.", callback=new_file)] = Path(
        "calibration.safetensors"
    ),
    device: Device = None,
    opening: Given = ORIGINAL,
    text: Given = text_of(),
    settings: Given = Function("compression/calibrate.py", "calibrate", ("progress",)),
) -> dict[str, Any]:
    """Measure what compress needs to know of a model, for any size."""
    from dofla import calibrate as measure
    from dofla.compression.known import unfinished
    from dofla.runs.check import target_of
    from dofla.runs.opening import open_original

    view = current_view()
    if target := target_of(model, settings.get("context"), settings.get("keep_softmax", ())):
        view.resumes = unfinished(target.fingerprint)
    opened, tokenizer = open_original(model, device=device, **opening)
    windows = calibration_windows(data, opened, tokenizer, text, settings)
    with view.progress("calibrate") as bar:
        found = measure(opened, windows, progress=bar.stage, **settings)
    found.save(out)
    view.show(found)
    written("calibration", out)
    same = carried({**opening, **settings}, ["dtype", *_OF_CACHE])
    following("compress", model, "--calibration", out, "--ratio", 16, *same, "--out", "compressed")
    return {"calibration": out, "model": found.model, **found.made_by}


def compress(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        Option(help="Folder for the whole model, as from_pretrained opens it; new.", callback=new_folder),
    ] = None,
    adapter: Annotated[
        Path | None, Option(help="Folder for an adapter instead, which names its base; new.", callback=new_folder)
    ] = None,
    size: Size = None,
    ratio: Ratio = None,
    calibration: Annotated[
        Path | None,
        Option(
            help="File from dofla calibrate; default: a known one, or --data sample.",
            callback=existing("a calibration"),
        ),
    ] = None,
    data: Annotated[str | None, Option(help=f"Calibration text: {DATA}.", callback=source)] = None,
    no_evict: Annotated[bool, Option("--no-evict", hidden=True)] = False,
    device: Device = None,
    opening: Given = ORIGINAL,
    text: Given = text_of(),
    settings: Given = Function("compression/compress.py", "compress", ("progress", "evict")),
) -> dict[str, Any]:
    """Compress the cache of a model; no training.

    A few heads, which find facts again, hold every token; --set retrieval_heads=0 makes the size constant.

    With --no-evict all heads hold every token: the cache grows, and takes no size.
    """
    from dofla import Calibration
    from dofla import compress as make
    from dofla.compression.compress import check_fit
    from dofla.compression.known import unfinished
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.converted import Converted
    from dofla.integration.room import check_disk
    from dofla.runs.check import target_of
    from dofla.runs.opening import open_original, reader_of
    from dofla.storage.files import new_folder

    if out is None and adapter is None:
        raise DoflaError("nowhere to write: give --out FOLDER for a whole model, or --adapter FOLDER")
    if out is not None and adapter is not None:
        one, other = out.resolve(), adapter.resolve()
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise DoflaError(f"--out {out} and --adapter {adapter}: give two folders, neither of them inside the other")
    if calibration is not None and data is not None:
        raise DoflaError(f"--calibration {calibration} and --data {data} are both given: give one of them")
    view, kinds = current_view(), {"compressed model": out, "adapter": adapter}
    measured = None if calibration is None else Calibration.load(calibration)
    if target := target_of(model, settings.get("context"), settings.get("keep_softmax", ())):  # before minutes go
        names = "head_budgets", "retrieval_heads", "prefill", "bits"
        given = {name: settings[name] for name in names if name in settings}
        check_fit(target, target.size(size, ratio, not no_evict), measured, **given)
        view.resumes = unfinished(target.fingerprint)
    with ExitStack() as stack:
        folders = {kind: stack.enter_context(new_folder(path)) for kind, path in kinds.items() if path is not None}
        compressed, tokenizer = open_original(model, device=device, **opening)
        if out is not None:
            check_disk(out, compressed.get_memory_footprint(), "the model")
        windows = None if data is None else calibration_windows(data, compressed, tokenizer, text, settings)
        options = {"ratio": ratio, "calibration": measured, "tokenizer": tokenizer, "evict": not no_evict, **settings}
        with view.progress("compress") as bar:
            make(compressed, windows, size, progress=bar.stage, **options)
        for kind, folder in folders.items():
            if kind == "adapter":
                write_adapter(compressed, folder)
            else:
                compressed.save_pretrained(folder)
            reader_of(model, compressed, tokenizer).save_pretrained(folder)
    if adapter is not None:
        warn_of_local_base(compressed, adapter)
    plan = Converted.of(compressed).plan
    view.show(plan)
    if heads := plan.made_by.get("retrieval_heads"):
        view.show(f"retrieval heads: {', '.join(f'{name} {head}' for name, own in heads.items() for head in own)}")
    for kind, path in kinds.items():
        if path is not None:
            written(kind, path)
    following("evaluate", out or adapter, "--data", data or "sample")
    return {"folder": out, "adapter": adapter, "state_bytes": plan.state_bytes(compressed.dtype), **plan.to_dict()}


def frontier(
    model: ModelArgument,
    data: SelfData = "sample",
    text: Annotated[
        list[str] | None,
        Option(help="Evaluation text, as --data; repeatable; default: the held-out part of --data.", callback=source),
    ] = None,
    lengths: Annotated[list[int] | None, Option(help="Length of a window, in tokens; repeatable; default 512.")] = None,
    sizes: Annotated[
        list[str] | None, Option(help="Cache size to try, as 1.5MiB; repeatable; default: five sizes.")
    ] = None,
    target: Annotated[
        float | None, Option(help="Largest acceptable loss increase, in nats per token; default: none.")
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Folder to write adapters, figures and the report to; it must be new.", callback=new_folder),
    ] = None,
    device: Device = None,
    opening: Given = IN_MEMORY,
    cutting: Given = text_of(("length",), windows=12),
    settings: Given = Function("runs/frontier.py", "frontier", ("progress",)),
) -> dict[str, Any]:
    """Find the smallest cache that keeps the quality on your text."""
    from dofla.report import write_page_beside
    from dofla.runs.check import target_of
    from dofla.runs.frontier import ADAPTERS, FRONTIER
    from dofla.runs.frontier import frontier as measure
    from dofla.runs.opening import open_original

    view, lengths = current_view(), list(dict.fromkeys(lengths or [512]))
    target_of(model, settings.get("context"))
    opened, tokenizer = open_original(model, device=device, **opening)
    text_alone = {name: value for name, value in cutting.items() if name != "windows"}  # those are of the evaluation
    windows = calibration_windows(data, opened, tokenizer, text_alone, settings)
    texts = {}
    for name, other in _named(text or [data]).items():
        # Calibration reads another part of the data, and nothing of other texts.
        split = "validation" if Path(other).resolve() == Path(data).resolve() else "all"
        cuts = [{**cutting, "length": length} for length in lengths]
        texts[name] = [windows_from(other, opened, tokenizer, cut, split) for cut in cuts]
    with view.progress("frontier") as bar:
        options = {"sizes": sizes, "target": target, "tokenizer": tokenizer, "out": out, **settings}
        found = measure(opened, windows, texts, progress=bar.stage, **options)
    view.show(found)
    if out is not None:
        written("frontier", out / FRONTIER)
        for size in found.kept:
            written("adapter", out / ADAPTERS / str(size))
        write_page_beside(out, view)
        if found.kept:
            following("chat", out / ADAPTERS / str(found.kept[0]))
    elif target is not None:
        given = {**opening, **cutting, "retrieval_heads": 0, **settings}
        changes = carried(given, ["seed", "text_field", "holdout", "dtype", "context", "retrieval_heads"])
        for size in found.kept:
            following("compress", model, "--size", size, "--data", data, *changes, "--out", f"compressed-{size}")
    return found.to_dict()


def _named(texts: list[str]) -> dict[str, str]:
    """The texts by the names of their files, or by themselves if two of the names are equal."""
    names = [Path(text).name.partition(".")[0] or text for text in texts]
    return dict(zip(names if len(set(names)) == len(set(texts)) else texts, texts, strict=True))
