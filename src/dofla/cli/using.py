"""The verbs that use a compressed model: evaluate, generate, serve; and chat, in a module of its own."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from dofla.cli.common import following, windows_from, written
from dofla.cli.options import (
    COMPRESSED,
    DATA,
    DRAWS,
    CompressedModel,
    Device,
    Given,
    Length,
    Windows,
    existing,
    new_file,
    set_seed,
    source,
    text_of,
)
from dofla.cli.settings import Function
from dofla.cli.verb import current_view
from dofla.errors import DoflaError, about, check_choice, check_numbers

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def _split(name: str | None) -> str | None:
    if name is not None:
        check_choice("split", name, ("all", "validation", "train"))
    return name


def evaluate(
    model: CompressedModel,
    data: Annotated[str | None, Option(help=f"Evaluation text: {DATA}.", callback=source)] = None,
    split: Annotated[
        str | None,
        Option(
            help="Part of the text: all, validation (held out) or train; default: all, or validation of a text that "
            "the model may have been made from.",
            callback=_split,
        ),
    ] = None,
    tasks: Annotated[
        str | None, Option(help="Tasks, comma-separated: JSONL files of multiple choice, or lm-eval names.")
    ] = None,
    windows: Windows = 64,
    length: Length = 512,
    out: Annotated[Path | None, Option(help="JSON file to write; it must be new.", callback=new_file)] = None,
    device: Device = None,
    opening: Given = COMPRESSED,
    text: Given = text_of(),
    settings: Given = Function("evaluation/run.py", "evaluate", ("progress",)),
    of_tasks: Given = Function("tasks/run.py", "evaluate_tasks", ("progress",)),
    showing: Given = Function("evaluation/run.py", "Evaluation.parts"),
) -> dict[str, Any]:
    """Compare a compressed model with its original.

    Reads text, does tasks, or both.
    """
    from dofla.evaluation import evaluate as measure
    from dofla.integration.converted import Converted
    from dofla.integration.surgery import describe
    from dofla.runs.opening import open_converted
    from dofla.storage.files import write_json
    from dofla.tasks import evaluate_tasks

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    if data is None and not names:
        raise DoflaError("nothing to evaluate on: give --data TEXT, or --tasks with one or more names, or both")
    view = current_view()
    opened, tokenizer = open_converted(model, device=device, **opening)
    figures: dict[str, Any] = {}
    if data is not None:
        cut = {**text, "length": length, "windows": windows}
        made_from = data in ("demo", "self") or Converted.of(opened).record.may_have_read(data)
        split = split or ("validation" if made_from else "all")
        tokens = windows_from(data, opened, tokenizer, cut, split)
        with view.progress("evaluate") as progress:
            result = measure(opened, tokens, progress=progress, **settings)
        view.show(*result.parts(**showing))
        figures = result.to_dict()
    if names:
        with view.progress("tasks") as progress:
            found = evaluate_tasks(opened, tokenizer, names, progress=progress, **of_tasks)
        view.show(found)
        figures = {**(figures or {"model": describe(opened)}), "tasks": found.to_dict()}
    if out is not None:
        write_json(out, figures)
        written("figures", out)
    if opened.can_generate():
        following("chat", model)
    return figures


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise DoflaError("no text to continue: give --prompt TEXT, pipe a text in, or start dofla chat")
    return sys.stdin.read().removesuffix("\n")


def generate(
    model: CompressedModel,
    prompt: Annotated[str | None, Option(help="Text to continue; default: standard input.", callback=_prompt)] = None,
    new_tokens: Annotated[int, Option(help="Maximum number of new tokens.")] = 100,
    sample: Annotated[bool, Option("--sample", help="Sample instead of taking the likeliest token.")] = False,
    chat: Annotated[bool, Option("--chat", help="Apply the chat template to the prompt.")] = False,
    prompt_state: Annotated[
        Path | None, Option(help="Saved cache to continue from; created from --document if missing.")
    ] = None,
    document: Annotated[
        Path | None, Option(help="Text file to read into --prompt-state first.", callback=existing("a text"))
    ] = None,
    device: Device = None,
    opening: Given = COMPRESSED,
    draws: Given = DRAWS,
) -> dict[str, Any]:
    """Continue a text with a compressed model."""
    import torch

    from dofla.integration.cache import CACHE_ARGUMENT
    from dofla.integration.offload import device_of
    from dofla.integration.reading import check_readable
    from dofla.runs.opening import open_converted
    from dofla.serving.models import writing

    text = _prompt(prompt)
    check_numbers(new_tokens=new_tokens)
    opened, tokenizer = open_converted(model, device=device, **opening)
    writing(opened)  # refuses an encoder
    ids, options = _tokens(tokenizer, text, chat), {"max_new_tokens": new_tokens, "do_sample": sample}
    check_readable(opened, ids, "--prompt", new_tokens)
    start = _prompt_state(opened, tokenizer, prompt_state, document)
    if start is not None:
        if ids.shape[1] > 1 and ids[0, 0] == tokenizer.bos_token_id:  # the document has begun already
            ids = ids[:, 1:]
        ids = torch.cat([start[0].cpu(), ids], dim=1)
        options[CACHE_ARGUMENT] = start[1]
        check_readable(opened, ids, f"{prompt_state} and --prompt", new_tokens)
    ids = ids.to(device_of(opened))
    set_seed(**draws)
    out = opened.generate(  # type: ignore[operator] # of their GenerationMixin
        ids, attention_mask=torch.ones_like(ids), **options
    )
    new = out[0, ids.shape[1] :]
    written = str(tokenizer.decode(new, skip_special_tokens=True))
    current_view().answer(written)
    return {"prompt": text, "text": written, "tokens": new.tolist()}


def serve(
    model: CompressedModel,
    host: Annotated[str, Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, Option(help="Port to listen on; 0: any free port.")] = 8000,
    sessions: Annotated[int, Option(help="Conversations whose cache is kept between turns.")] = 32,
    session_folder: Annotated[
        Path | None, Option(help="Folder to keep conversations in; a server that starts reads them.", hidden=True)
    ] = None,
    at_once: Annotated[int, Option(help="Maximum number of concurrent requests; 1 with --compile.")] = 16,
    compile: Annotated[
        bool, Option("--compile", help="Decode with torch.compile: faster, but the first request takes minutes.")
    ] = False,
    api_key: Annotated[
        str | None, Option(envvar="DOFLA_API_KEY", help="Key that clients must send; default: none is needed.")
    ] = None,
    device: Device = None,
    opening: Given = COMPRESSED,
    serving: Given = Function("serving/server.py", "server", ("at_once", "key")),
) -> dict[str, Any]:
    """Serve a compressed model over an OpenAI-compatible API.

    A turn of a conversation reads only its new tokens. With --session-folder DIR it also does so after a restart.
    """
    from dofla.runs.opening import open_converted, reader_of
    from dofla.serving.compiled_model import CompiledModel
    from dofla.serving.continuous_batching import ContinuousBatching
    from dofla.storage.extras import extra

    for name in ("fastapi", "uvicorn", "openai"):
        extra(name, "serve", "serving")
    from dofla.serving.guard import check_key
    from dofla.serving.server import conversing, is_open, listening, server

    check_numbers(sessions=sessions, at_once=at_once, **serving)
    check_key(api_key)
    with listening(host, port) as place, ExitStack() as stack:
        opened, tokenizer = open_converted(model, device=device, **opening)
        writer = CompiledModel(opened) if compile else stack.enter_context(ContinuousBatching(opened))
        name = (Path(model).resolve() if Path(model).is_dir() else Path(model)).name
        if api_key is None and is_open(place):
            logger.warning("anyone who reaches --host %s is answered: give --api-key, or DOFLA_API_KEY", host)
        answering, reader = conversing(writer, sessions, session_folder), reader_of(model, opened, tokenizer)
        current_view().show(f"{name} answers at http://{host}:{place.getsockname()[1]}/v1 until Ctrl-C")
        at_once = 1 if compile else at_once
        server(name, answering, reader, at_once, key=api_key, **serving).run(sockets=[place])
    return {"model": name}


def _tokens(tokenizer: Any, prompt: str, chat: bool) -> Tensor:
    """The token ids of the prompt [1, L], with ``chat`` as a message in the tokenizer's chat template.

    Raises:
        DoflaError: there is no chat template that works, or the prompt has no tokens.
    """
    from dofla.serving.chat import templated

    if chat and not tokenizer.chat_template:
        raise DoflaError("--chat needs a chat template, and the tokenizer has none: leave it out")
    message = [{"role": "user", "content": prompt}]
    ids = templated(tokenizer, message) if chat else tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        raise DoflaError(f"--prompt {prompt!r} has no tokens: give a text to continue")
    return ids


def _prompt_state(model: Any, tokenizer: Any, path: Path | None, document: Path | None) -> tuple[Any, Any] | None:
    """The tokens and the cache to go on from, read from ``path`` or, the first time, from ``document``."""
    from dofla.data import read_documents
    from dofla.serving.prompt_state import check_saved, load_state, read_prompt, save_state

    if path is None:
        if document is not None:
            raise DoflaError(f"--document {document} needs --prompt-state FILE, where its state is kept")
        return None
    if not path.exists():
        if document is None:
            raise DoflaError(f"{path} does not exist: add --document FILE to make it")
        check_saved(model)
        text = "\n\n".join(read_documents(document))
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        with about(document):
            cache = read_prompt(model, ids)
        save_state(cache, ids, path, model)
    return load_state(path, model)
