"""Windows of tokens from any source, the model's own samples among them, for when its training text is not at hand."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from dofla.data import TokenWindows
from dofla.data.documents import Source
from dofla.data.packing import check_cut, membership, separator_id, stream_seed, text_windows
from dofla.errors import DoflaError
from dofla.integration.offload import device_of
from dofla.integration.positions import positions_of
from dofla.integration.recorder import evaluation_mode
from dofla.integration.surgery import as_teacher
from dofla.integration.wrapped import takes_model
from dofla.storage.defaults import torchs_defaults

BATCH = 64
"""Windows that are sampled at a time."""


@torchs_defaults()
def token_windows(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = 512,
    windows: int | None = None,
    split: str = "train",
    holdout: float = 0.05,
    seed: int = 0,
    text_field: str = "text",
    padded: bool = False,
    model: PreTrainedModel | None = None,
    progress: Callable[[int, int], None] | bool = True,
) -> TokenWindows:
    """Windows of tokens from any source, in the order of its documents; the same each time.

    Packed windows are for causal models: before each document stands one separator, the first of bos, eos, cls, sep
    that the tokenizer has, if any; the stream is cut into windows, and the tail that fills none is dropped. Padded ones
    are for encoders: each document is a window, or, if it has several lines, each line above 20 characters is; with
    special tokens, truncated at ``length``, padded on the right to the longest of the result.

    Args:
        source: what :func:`dofla.data.read_documents` takes; or a .safetensors file whose tensor ``input_ids`` [N, L]
            holds unpadded tokens, L ≥ length, each row cut into L // length windows; or the word ``self``, samples of
            ``model`` itself.
        tokenizer: of the model that the windows are for.
        length: tokens per window; of padded ones, at most.
        windows: how many at most; None takes all the source has (``self`` needs a number).
        split: ``train``, ``validation`` or ``all``. A document (a row of a token file) is in validation if a hash of
            its text is below ``holdout``: membership depends on nothing else. For ``self`` each split is a stream of
            random numbers of its own.
        holdout: fraction in [0, 1) of the documents that are for validation.
        seed: of the samples that ``self`` draws, and of nothing else.
        text_field: where the text stands in records.
        padded: one text per window instead of packed ones.
        model: to sample from, for ``self``.
        progress: of ``self``: a bar by default, where there is a terminal or a notebook; False for none; or a function,
            which is called with (done, total) after each token of a batch.

    Returns:
        At most ``windows`` windows, input_ids [N, length]; padded ones with a mask.

    Raises:
        DoflaError: bad arguments; a bad source, or one with too little text for one window.
    """
    check_cut(length, windows)
    keep = membership(split, holdout)
    if source != "self":
        return text_windows(source, tokenizer, length, windows, split, keep, text_field, padded)
    if model is None or windows is None:
        raise DoflaError(f'source "self": no {"model" if model is None else "number of windows"} given; give one')
    own = stream_seed(seed, split)
    samples = self_sample(model, tokenizer, count=windows, length=length, seed=own, progress=progress)
    return replace(samples, source=f"self: samples of {type(model).__name__} ({split}, seed {seed})")


@takes_model("sample text")
def self_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    length: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | bool = True,
) -> TokenWindows:
    """Windows of tokens drawn from the model, each starting with the tokenizer's separator.

    Ancestral sampling from the distribution of the model, or of the original of a converted one: the top-k, penalties
    and the like that a checkpoint carries for chatting are not applied, and an end-of-text token does not end a window,
    since text packed into windows has them inside. Same seed and machine: same windows. The global random state, the
    model's mode and its generation settings are left as they were. DoflaError for a model that generates no text, and
    too long windows.
    """
    start = _checked_start(model, separator_id(tokenizer), length)
    counter = _Counter(progress, length * math.ceil(count / BATCH)) if callable(progress) else None
    samples = []
    with as_teacher(model), evaluation_mode(model), _sampling_settings(model, length), torch.random.fork_rng():
        torch.manual_seed(seed)
        for begin in range(0, count, BATCH):
            prompt = torch.full((min(BATCH, count - begin), 1), start, dtype=torch.int64, device=device_of(model))
            # Of models that write, which transformers' types do not tell from others.
            drawn = model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), streamer=counter
            )
            samples.append(drawn.cpu())
    return TokenWindows(torch.cat(samples), source=f"self-sampled from {type(model).__name__}, seed {seed}")


class _Counter(BaseStreamer):
    """Counts what ``generate`` writes: the tokens of a batch side by side are one."""

    def __init__(self, progress: Callable[[int, int], None], total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def put(self, value: torch.Tensor) -> None:
        self._done += 1
        self._progress(self._done, self._total)

    def end(self) -> None:
        pass


def _checked_start(model: PreTrainedModel, start: int | None, length: int) -> int:
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise DoflaError(
            f"model: {type(model).__name__} cannot be sampled from; give a causal language model, or a text as source"
        )
    if start is None:
        raise DoflaError("tokenizer: no bos, eos, cls or sep token to start a sample from; set tokenizer.bos_token")
    positions = positions_of(model)
    if positions is not None and length > positions:
        raise DoflaError(
            f"length: {length}, and {type(model).__name__} has {positions} positions; give {positions} or less"
        )
    return start


@contextmanager
def _sampling_settings(model: PreTrainedModel, length: int) -> Iterator[None]:
    """Plain sampling to exactly `length` tokens, for as long as the context lasts.

    The model's own generation config is set aside rather than overridden: `generate` fills whatever an argument leaves
    at None, eos_token_id included, from it.
    """
    settings = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_length=length, use_cache=True
    )
    try:
        yield
    finally:
        model.generation_config = settings
