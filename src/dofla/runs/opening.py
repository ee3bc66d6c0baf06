"""Opening what verbs and recipes name: an original or a converted model, its tokenizer, and text cut into windows."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from dofla.data import TokenWindows, read_documents
from dofla.errors import DoflaError, check_choice, first_line
from dofla.integration.checkpoint import load, load_model
from dofla.integration.contents import check_original
from dofla.integration.int8_weights import load_in_int8
from dofla.integration.packages import DEMO, packaged_path
from dofla.integration.precision import half_is_slow
from dofla.integration.reading import check_readable
from dofla.integration.self_samples import token_windows
from dofla.integration.tokenizer import load_tokenizer
from dofla.runs.demo.data import demo_windows
from dofla.runs.recipe import DataSpec
from dofla.runs.view import View

logger = logging.getLogger(__name__)
INT8 = "int8"
"""The ``dtype`` of a model whose weights are in int8."""


def windows_of(
    spec: DataSpec,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    view: View | None = None,
) -> TokenWindows:
    """The windows a DataSpec asks for; the source ``demo`` is the bundled mixture. Where text is sampled, which
    takes long, the ``view`` shows it. DoflaError for a bad source, too little text in it, or text that the
    model cannot read."""
    if spec.source == "demo":
        if tokenizer.get_vocab() != load_tokenizer(packaged_path(DEMO)).get_vocab():
            raise DoflaError("data is demo: the tokens of another tokenizer, so take it for the model demo alone")
        return demo_windows(spec.windows, spec.length, split=spec.split)
    cut = {name: value for name, value in vars(spec).items() if name != "source"}
    with view.progress("sample text") if view and spec.source == "self" else nullcontext(False) as bar:
        windows = token_windows(spec.source, tokenizer, model=model, seed=seed, progress=bar, **cut)
    check_readable(model, windows.input_ids, windows.source)
    logger.info("%d windows of %d tokens from %s", len(windows), windows.length, windows.source)
    return windows


def open_original(
    name: str, dtype: str | None = None, device: str | None = None, offload: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a folder, hub name, ``demo``, or ``package:NAME/FOLDER`` (inside an installed package).
    Arguments as of :func:`open_converted`."""
    path = packaged_path(name)
    logger.info("loading %s", path)
    check_original(path)
    tokenizer = load_tokenizer(path)  # takes less time than weights to fail
    return _placed(partial(load_model, path), dtype, device, offload), tokenizer


def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """The bundled model, to try everything without a network: 3.5 million parameters, trained on children's stories.

        model, tokenizer, text = dofla.demo()
        windows = dofla.token_windows("sample", tokenizer, windows=12)

    It is in bfloat16, or float32 on processors that are slow in bfloat16. The text is that of the data source
    ``sample``, about 150,000 tokens, documents with a blank line between them.
    """
    model, tokenizer = open_original("demo")
    return model, tokenizer, "\n\n".join(read_documents("sample"))


def open_converted(
    name: str,
    dtype: str | None = None,
    base_model: str | None = None,
    device: str | None = None,
    offload: Path | None = None,
    *,
    load: Callable[..., PreTrainedModel] = load,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A converted model by folder or hub name, adapter or standalone; and its tokenizer, which may be its base model's.

    Args:
        name: of the model.
        dtype: to load it in; default that of the checkpoint, or float32 on processors that are slow in half precision.
            With int8 the weights of linear layers are in that (torchao), all else as by default.
        base_model: where an adapter's base is, if not where the adapter says; any name that :func:`open_original`
            takes.
        device: see :func:`device_of`.
        offload: folder for layers that do not fit in memory, which accelerate then places.
        load: by :func:`dofla.integration.checkpoint.load_any`, softmax models open as well.

    Raises:
        DoflaError: no such model; no tokenizer with it or its base model; no such dtype or device; a device with
            ``offload``.
    """
    logger.info("loading %s", name)
    base_model = None if base_model is None else packaged_path(base_model)
    model = _placed(partial(load, name, base_model=base_model), dtype, device, offload)
    return model, load_tokenizer(packaged_path(name), packaged_path(model.config._name_or_path))


def _placed(
    load: Callable[..., PreTrainedModel], dtype: str | None, device: str | None, offload: Path | None
) -> PreTrainedModel:
    if device is not None and offload is not None:
        raise DoflaError(f"device is {device!r}: with offload accelerate places the layers, so leave device out")
    place = device_of("auto" if offload else device)
    options: dict[str, Any] = {"device_map": "auto", "offload_folder": offload} if offload else {}
    if dtype == INT8 and offload is not None:
        raise DoflaError("dtype is int8: with offload weights stay as they are, so leave one of them out")
    if dtype not in (None, INT8):
        options["dtype"] = dtype_of(dtype)
    elif place.type == "cpu" and half_is_slow():
        logger.info("models open in float32, as this processor is slow in bfloat16 (--set dtype=bfloat16: in that)")
        options["dtype"] = torch.float32
    model = load_in_int8(load, **options) if dtype == INT8 else load(**options)
    return model if device is None else model.to(place)  # type: ignore[arg-type] # transformers wraps it


def device_of(name: str | None) -> torch.device:
    """The device of a name: ``cpu``, ``cuda``, ``cuda:1``, ``mps`` or another that torch knows; ``auto`` is the first
    accelerator, or the CPU where there is none; None is the CPU. DoflaError for one that is not available."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name in (None, "auto"):
        return torch.device("cpu" if name is None or kind is None else kind.type)
    names = ["cpu"]
    if kind is not None:
        names += [kind.type, *(f"{kind.type}:{n}" for n in range(torch.accelerator.device_count()))]
    if name not in names:
        raise DoflaError(f"device {name!r} is not available: choose {', '.join(names)} or auto")
    return torch.device(name)


def reader_of(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase | ProcessorMixin:
    """The processor of texts and pictures of a model that sees, from the folder or hub name that it was opened by or
    its base model's; the tokenizer for any other model, and, with a warning, if there is no processor."""
    if getattr(model.config, "vision_config", None) is None:
        return tokenizer
    for place in (name, packaged_path(model.config._name_or_path)):
        try:
            return AutoProcessor.from_pretrained(place, trust_remote_code=False)
        except Exception as error:  # a damaged file fails in any way
            reason = first_line(error)
    logger.warning("%s reads texts alone, for it has no processor of pictures: %s", name, reason)
    return tokenizer


def dtype_of(name: str) -> torch.dtype:
    """``float32``, ``bfloat16`` or ``float16`` as a torch dtype."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    check_choice("dtype", name, [*known, INT8])
    return known[name]
