"""The verb ``dofla chat``."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

from typer import Option

from dofla.cli.options import COMPRESSED, DRAWS, Device, Given, ModelArgument, set_seed
from dofla.cli.verb import current_view
from dofla.errors import DoflaError, check_numbers

_HELP = "/reset begins anew, /stats shows the cache, /exit leaves; Ctrl-C stops an answer"


def chat(
    model: ModelArgument,
    new_tokens: Annotated[int, Option(help="Maximum number of tokens of an answer.")] = 512,
    sample: Annotated[bool, Option("--sample", help="Sample; default: the model's generation settings.")] = False,
    system: Annotated[str | None, Option(help="System message; default: none.")] = None,
    compile: Annotated[
        bool, Option("--compile", help="Decode with torch.compile: faster, but the first answer takes minutes.")
    ] = False,
    device: Device = None,
    opening: Given = COMPRESSED,
    draws: Given = DRAWS,
) -> dict[str, Any]:
    """Chat with a model, compressed or not.

    The cache is kept between turns. Lines of a piped standard input are turns, too.
    """
    from dofla.display import size
    from dofla.integration.checkpoint import load_any
    from dofla.runs.opening import open_converted
    from dofla.serving.chat import Conversation

    check_numbers(new_tokens=new_tokens)
    view, asked = current_view(), sys.stdin.isatty()
    network, tokenizer = open_converted(model, device=device, load=load_any, **opening)
    options: dict[str, Any] = {"new_tokens": new_tokens, "sample": sample, "system": system, "compile": compile}
    conversation = Conversation(network, tokenizer, **options)
    if not conversation.templated:
        view.note("the tokenizer has no chat template: the model continues your text")
    if asked:
        view.show(_HELP)
    elif not view.quiet:
        view.note(_HELP)
    set_seed(**draws)
    turns = []
    for line in filter(str.strip, _lines(asked)):
        if line.strip() == "/exit":
            break
        if line.strip() == "/reset":
            conversation.reset()
        elif line.strip() == "/stats":
            tokens, cache, full = conversation.stats().values()
            view.answer(f"{tokens:,} tokens read; cache {size(cache)}, full cache {size(full)}")
        elif line.startswith("/") and asked:
            view.note(_HELP)
        else:
            try:
                text, ending = conversation.answer(line, view.stream)
            except DoflaError as error:
                if not asked:
                    raise
                view.note(f"{error}, or /reset")
                continue
            view.answer(" [stopped]" if ending == "interrupted" else "")
            if ending == "cut" and not view.quiet:
                view.note(f"… (cut at --new-tokens {new_tokens})")
            ended = {"interrupted": ending == "interrupted", "cut": ending == "cut"}
            turns.append({"prompt": line, "text": text, **ended})
    return {"model": model, "turns": turns, **conversation.stats()}


def _lines(asked: bool) -> Iterator[str]:
    """Lines of standard input until it ends; on a terminal, each is asked for and may be edited."""
    if not asked:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return
