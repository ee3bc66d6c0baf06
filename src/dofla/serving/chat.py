"""A conversation with a model, compressed or not, whose cache is kept from turn to turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from dofla.display import size
from dofla.errors import DoflaError
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.reading import check_readable
from dofla.integration.sites import attention_sites
from dofla.integration.student import Student, is_linearized
from dofla.serving.sessions import keep_sessions


@dataclass(frozen=True)
class Stats:
    """
    Attributes:
        tokens: of the conversation.
        cache_bytes: the cache as it is now.
        full_bytes: a key-value cache of these tokens, in the model's dtype.
    """

    tokens: int
    cache_bytes: int
    full_bytes: int

    def __str__(self) -> str:
        cache, full = size(self.cache_bytes), size(self.full_bytes)
        return f"{self.tokens:,} tokens read; cache {cache}, full cache {full}"


class Conversation:
    """Turns by the tokenizer's chat template; without one, a text that the model continues.

    Args:
        model: a causal model. A compressed one reads only the new tokens of a turn (:func:`dofla.keep_sessions`), a
            plain one too unless its template changes earlier turns.
        tokenizer: the model's.
        new_tokens: of an answer, at most.
        sample: whether to sample; otherwise as the model's generation settings say.
        system: message before the first turn.

    Attributes:
        templated: whether there is a chat template.

    Raises:
        DoflaError: a model that writes no text; a system message without a template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        new_tokens: int = 512,
        sample: bool = False,
        system: str | None = None,
    ) -> None:
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise DoflaError(f"{type(model).__name__} is not a causal language model: there is no chatting with it")
        self.model, self.tokenizer, self.new_tokens, self.sample = model, tokenizer, new_tokens, sample
        self.templated, self.system = tokenizer.chat_template is not None, system
        if system is not None and not self.templated:
            raise DoflaError("a system message needs a chat template, and the tokenizer has none: leave it out")
        self.reset()

    def reset(self) -> None:
        """Forget all turns, and the cache."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._tokens: list[int] = []
        self._cache: Cache | None = None
        if is_linearized(self.model):
            keep_sessions(self.model, most=1)

    def answer(self, text: str, show: Callable[[str], None]) -> tuple[str, bool]:
        """Read a turn and write the next; what is written by Ctrl-C is a turn, too.

        Args:
            text: of the user.
            show: called with the answer, piece by piece.

        Returns:
            The answer, and whether it was interrupted.

        Raises:
            DoflaError: more tokens than the model has positions; a template that fails.
        """
        ids = self._prompt(text)
        check_readable(self.model, ids, "the conversation", self.new_tokens)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self.new_tokens}
        if self.sample:
            options["do_sample"] = True
        if not is_linearized(self.model):
            options[CACHE_ARGUMENT] = self._cache = self._grown(ids)
        written, interrupted = _Written(self.tokenizer, show), False
        try:
            self.model.generate(ids, streamer=written, **options)  # type: ignore[operator] # of their GenerationMixin
        except KeyboardInterrupt:
            written.end()
            self._cache, interrupted = None, True  # some of its layers may have read a token that others have not
        self._tokens = ids[0].tolist() + written.tokens
        found = str(self.tokenizer.decode(written.tokens, skip_special_tokens=True))
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": found}]
        return found, interrupted

    def stats(self) -> Stats:
        """Sizes of the conversation so far."""
        tokens, dtype = len(self._tokens), self.model.dtype
        if is_linearized(self.model):
            plan = Student.of(self.model).plan
            cache = plan.state_bytes(dtype) + plan.kept_softmax_bytes(tokens, dtype)
            return Stats(tokens, cache, plan.softmax_bytes(tokens, dtype))
        sites = attention_sites(self.model).values()
        numbers = sum(site.kv_heads * (site.head_dim + site.value_dim) for site in sites)
        return Stats(tokens, tokens * numbers * dtype.itemsize, tokens * numbers * dtype.itemsize)

    def _prompt(self, text: str) -> Tensor:
        """Tokens [1, L] of all turns."""
        if self.templated:
            messages = [*self._messages, {"role": "user", "content": text}]
            try:
                read = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                ids = cast("Mapping[str, Tensor]", read)["input_ids"]  # so return_dict and return_tensors say
            except Exception as error:  # a template is a program, and fails in any way
                raise DoflaError(f"the tokenizer's chat template does not work: {error}") from error
        else:
            known = [token for token in self._tokens if token != self.tokenizer.eos_token_id]
            new = self.tokenizer(f"\n{text}" if known else text, add_special_tokens=not known)["input_ids"]
            ids = torch.tensor([known + new], dtype=torch.int64)
        return ids.to(self.model.device)

    def _grown(self, ids: Tensor) -> Cache:
        """The cache to go on with: that of the turns before if the prompt begins with what it has read."""
        if self._cache is not None:
            read = self._cache.get_seq_length()
            if 0 < read < ids.shape[1] and ids[0, :read].tolist() == self._tokens[:read]:
                return self._cache
        return DynamicCache(config=self.model.config)


class _Written(TextStreamer):
    """Hands on what ``generate`` writes, and keeps its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens: list[int] = []
        self._show = show

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._show(text)
