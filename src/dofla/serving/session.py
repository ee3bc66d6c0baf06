"""Conversations that a model continues: the cache after a text is kept for when the text returns, longer."""

import logging
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.generation import GenerationMode

from dofla.errors import DoflaError, about, check_numbers
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.converted import Converted
from dofla.integration.positions import read_again, restart_index, text_positions
from dofla.integration.reading import check_keeps_states, check_readable
from dofla.serving.compiled_model import CompiledModel
from dofla.serving.continuous_batching import ContinuousBatching
from dofla.serving.models import usable_positions, writing
from dofla.serving.prompt_state import check_saved, load_state, read_prompt, save_state

logger = logging.getLogger(__name__)

_SNAPSHOTS = 2
"""Caches of a conversation: after its last prompt, from which another answer can be written, and after the answer."""
_ANSWER = 2
"""Divisor of the positions: at least one part in so many is left to an answer, if it may be that long."""
_PIECE = 1024
"""Tokens of a prompt that are read at a time: others wait for no more of them (:class:`ContinuousBatching`)."""
_OWN = re.compile("[0-9a-f]{32}")
"""Names of files that a session makes."""
_WRITTEN = 20
"""Tokens that transformers writes if nothing is said."""
_TAKEN = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer"}
"""Arguments of ``generate``, beside the tokens and the settings, that play no part in how a text is read."""
_PLAIN = {"num_return_sequences": 1, "use_cache": True, "cache_implementation": None, "guidance_scale": 1}
_PLAIN |= {"token_healing": False, "output_attentions": False, "output_hidden_states": False}
"""Settings that must have this value, or none."""


class NotOneText(DoflaError):
    """A call that does more than to continue one text."""


class Session:
    """``generate`` of a model that reads only the tokens which are new since earlier calls.

        session = dofla.serving.Session(model)
        for turn in turns:
            input_ids = session.generate(torch.cat([input_ids, turn], dim=1), max_new_tokens=50)

    A turn of a chat repeats all turns before it. The cache after them is kept, so a turn costs its own tokens. A
    compressed cache cannot be rolled back. Hence there are two of a conversation: if the answer returns in other tokens
    than it was written in, or is to be written again, that after the prompt serves. Conversations are told apart by
    their tokens, so one session serves many, from several threads.

    A conversation may have more tokens than the model has positions. Before an answer would pass them, a new cache
    begins with the last quarter of them, and what stood before is forgotten. An answer has room for half the positions.

    Args:
        model: a causal language model, a :class:`ContinuousBatching` or a :class:`CompiledModel`. After its weights or
            adapters have changed, call :meth:`reset`.
        most: conversations that are remembered; the least recently continued one is forgotten first.
        folder: where each conversation is written after an answer, as :func:`dofla.serving.save_state` writes it, and
            from which the latest are read at the beginning; the plug-in for vLLM goes on from the same files. The file
            of one that is forgotten is removed, unless it has a name that was given elsewhere.

    Attributes:
        read: tokens of the last prompt that had to be read, its very last not counted.

    Raises:
        DoflaError: the model writes no text, or has a cache of its own kind; ``most`` below 1; a compiled model with
            heads that hold every token and no number of positions; a folder for one that is not compressed as a whole,
            or in a compiled graph.
    """

    def __init__(
        self,
        model: nn.Module | ContinuousBatching | CompiledModel,
        most: int = 32,
        folder: str | Path | None = None,
    ) -> None:
        check_numbers(most=most)
        self.model = writing(model if isinstance(model, nn.Module) else model.model)
        check_keeps_states(self.model)
        self._positions = usable_positions(self.model) or sys.maxsize
        self._static, self._room = isinstance(model, CompiledModel), 1  # at a constant size, for any length
        if self._static and Converted.of(self.model).plan.growing:
            if self._positions == sys.maxsize:
                raise DoflaError(
                    "the model states no number of positions, for which a compiled cache that grows has room"
                )
            self._room = self._positions
        self._writer: Any = model
        self._most, self.read = _SNAPSHOTS * most, 0
        self._lock, self._writing = threading.Lock(), threading.Lock()  # of what is known, and of its files
        self._files: OrderedDict[tuple[int, ...], Path] = OrderedDict()  # by the text whose states they hold
        self.reset()
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._open(self._folder)

    def reset(self) -> None:
        """Forget all conversations, and remove the files that they were written to."""
        for path in self._files.values():
            _remove(path)
        # Of each text, the token at which its cache begins, and the cache. Calls that are not done go on with theirs.
        self._known: OrderedDict[tuple[int, ...], tuple[int, Cache]] = OrderedDict()
        self._files = OrderedDict()

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """The result of ``model.generate`` for one text, without the cache, up to the order of sums in its prompt; and
        where prompts are read exactly (``prefill``), up to where they are cut.

        Args:
            input_ids: the whole conversation [1, L].
            attention_mask: ones [1, L].
            options: settings, or a ``generation_config``; a streamer, logits processors, stopping criteria.

        Raises:
            DoflaError: several texts, beams, padding, a cache, pictures, or any other argument that is not known here;
                tokens that the model does not know.
        """
        config, options = _settings(self.model, input_ids, attention_mask, options)
        check_readable(self.model, input_ids[:, -1:], "the text")  # those before it are checked as they are read
        known, files, length, asked = self._known, self._files, input_ids.shape[1], config.max_new_tokens
        if asked is None:
            asked = _WRITTEN if config.max_length is None else config.max_length - length
        begun, cache = self._before(known, input_ids, min(asked, self._positions // _ANSWER))
        room = self._positions - (length - begun)
        if asked > room:
            logger.warning("max_new_tokens: %d, and positions end after %d: so will the answer", asked, room)
        config.max_new_tokens, config.max_length = min(asked, room), None
        config.min_length = config.min_length and config.min_length - begun
        own = input_ids[:, begun:]  # positions are counted from where the cache begins
        options |= {CACHE_ARGUMENT: cache, **text_positions(self.model, length - begun)}
        result = self._writer.generate(own, attention_mask=torch.ones_like(own), generation_config=config, **options)
        written = result if isinstance(result, Tensor) else result.sequences
        text = torch.cat([input_ids[:, :begun].to(written.device), written], dim=1)
        self._remember(known, text[:, :-1], begun, cache)  # the last token was written, and never read
        if self._folder is not None and not begun:
            self._write(files, self._folder, input_ids, text[:, :-1], cache)
        if isinstance(result, Tensor):
            return text
        result.sequences = text
        setattr(result, CACHE_ARGUMENT, None)
        return result

    def _before(self, known: OrderedDict, input_ids: Tensor, room: int) -> tuple[int, Cache]:
        """Where a cache with ``room`` for more begins in a prompt [1, L], and a copy of that up to its last token."""
        tokens = tuple(input_ids[0, :-1].tolist())
        with self._lock:
            prefix = _prefix(known, tokens)
            begun, cache = known.get(prefix, (0, None))
            if prefix and len(prefix) == len(tokens):
                known.move_to_end(prefix)
        length, overlap = input_ids.shape[1] + room, read_again(self._positions)
        first = restart_index(begun, len(prefix), length, self._positions, overlap)
        if cache is not None and first == begun:
            cache, read = deepcopy(cache), len(prefix)
        else:
            config, read = self.model.config, first
            cache = StaticCache(config, max_cache_len=self._room) if self._static else DynamicCache(config=config)
        self.read = len(tokens) - read
        if self.read:
            read_prompt(self.model, input_ids[:, read:-1], chunk=_PIECE, cache=cache)
            self._remember(known, input_ids[:, :-1], first, deepcopy(cache))
        return first, cache

    def _open(self, folder: Path) -> None:
        """Read the latest conversations in the folder."""
        if self._static:
            raise DoflaError(f"{folder} takes no conversations of a compiled model: leave one of the two out")
        with about(folder):
            check_saved(self.model)
        found = (path for path in folder.glob("*.safetensors") if path.is_file())
        for path in sorted(found, key=lambda path: path.stat().st_mtime)[-(self._most // _SNAPSHOTS) :]:
            try:
                text, cache = load_state(path, self.model)
            except DoflaError as error:
                logger.warning("passed over: %s", error)
                continue
            if len(text) == 1:
                self._remember(self._known, text, 0, cache)
                self._files[tuple(text[0].tolist())] = path

    def _write(self, files: OrderedDict, folder: Path, prompt: Tensor, text: Tensor, cache: Cache) -> None:
        """Write the states of a text over those of the text that it goes on from, if there is a file of these."""
        tokens, key = tuple(prompt[0].tolist()), tuple(text[0].tolist())
        with self._writing:
            before = key if key in files else _prefix(files, tokens)
            path = files.pop(before, None) or folder / f"{uuid4().hex}.safetensors"
            files[key] = path
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_state(cache, text, path, self.model)
            except Exception as error:  # the answer is there
                logger.error("%s: %s", path, error)
            while len(files) > self._most // _SNAPSHOTS:
                _remove(files.popitem(last=False)[1])

    def _remember(self, known: OrderedDict, text: Tensor, begun: int, cache: Cache) -> None:
        key = tuple(text[0].tolist())
        with self._lock:
            known[key] = begun, cache
            known.move_to_end(key)
            while len(known) > self._most:
                known.popitem(last=False)


def _remove(path: Path) -> None:
    """Remove the file of a conversation, unless it has a name that was given elsewhere."""
    if _OWN.fullmatch(path.stem):
        path.unlink(missing_ok=True)


def _prefix(texts: Iterable[tuple[int, ...]], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The longest of these texts with which the tokens begin; empty if there is none."""
    return max((text for text in texts if tokens[: len(text)] == text), key=len, default=())


def _settings(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """All settings of a call, as ``generate`` finds them, and its other arguments; NotOneText for what is refused."""
    config = deepcopy(options.pop("generation_config", None) or model.generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    options = {name: value for name, value in config.update(**options).items() if value is not None}
    shape, pad, stops = list(input_ids.shape), config.pad_token_id, config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    refused = [f"{name} is given" for name in options.keys() - _TAKEN]
    refused += [f"{name} is {x}" for name, v in _PLAIN.items() if (x := getattr(config, name, None)) not in (None, v)]
    if len(shape) != 2 or shape[0] != 1 or not shape[1]:
        refused.append(f"input_ids has the shape {shape}")
    elif attention_mask is None and pad not in (None, *stops) and bool((input_ids == pad).any()):
        refused.append(f"token {pad} is padding where no attention_mask is given")
    elif attention_mask is not None and not (list(attention_mask.shape) == shape and bool(attention_mask.all())):
        refused.append("attention_mask is not all ones")
    if (mode := config.get_generation_mode()) not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        refused.append(f"the settings ask for {mode.value.replace('_', ' ')}")
    if refused:
        raise NotOneText(f"a session continues one text, and {refused[0]}: call model.generate")
    return config, options
