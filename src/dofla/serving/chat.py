"""A conversation with a model, compressed or not, whose cache is kept from turn to turn."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from dofla.errors import DoflaError
from dofla.integration.converted import Converted, is_converted
from dofla.integration.offload import device_of
from dofla.integration.reading import keeps_states
from dofla.integration.sites import attention_sites
from dofla.serving.compiled_model import CompiledModel
from dofla.serving.session import Session

Ending: TypeAlias = Literal["complete", "cut", "interrupted"]


class Conversation:
    """Turns by the tokenizer's chat template; without one, a text that the model continues.

    Args:
        model: a causal model, which reads only the new tokens of a turn (:class:`Session`).
        tokenizer: the model's.
        new_tokens: of an answer, at most.
        sample: whether to sample; otherwise as the model's generation settings say.
        system: message before the first turn.
        compile: whether tokens come from a compiled graph (:class:`CompiledModel`), which wants a compressed model.

    Attributes:
        templated: whether there is a chat template.

    Raises:
        DoflaError: a model that writes no text, or cannot be compiled; a system message without a template.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        new_tokens: int = 512,
        sample: bool = False,
        system: str | None = None,
        compile: bool = False,
    ) -> None:
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise DoflaError(f"{type(model).__name__} is not a causal language model: there is no chatting with it")
        self.model, self.tokenizer, self.new_tokens, self.sample = model, tokenizer, new_tokens, sample
        self.templated, self.system = tokenizer.chat_template is not None, system
        if system is not None and not self.templated:
            raise DoflaError("a system message needs a chat template, and the tokenizer has none: leave it out")
        self._step: Any = CompiledModel(model) if compile else model
        self.reset()

    def reset(self) -> None:
        """Forget all turns, and the cache."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._tokens: list[int] = []
        # A model with a cache of its own kind reads each turn as a whole.
        self.writer: Any = Session(self._step, most=1) if keeps_states(self.model) else self._step

    def answer(self, text: str, show: Callable[[str], None]) -> tuple[str, Ending]:
        """Read a turn and write the next; what is written by Ctrl-C is a turn, too.

        Args:
            text: of the user.
            show: called with the answer, piece by piece.

        Returns:
            The answer, and how it ended: by itself, at ``new_tokens``, or by Ctrl-C.
        """
        ids = self._prompt(text)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": self.new_tokens}
        if self.sample:
            options["do_sample"] = True
        written, ending = _Written(self.tokenizer, show), cast("Ending", "complete")
        stops = self.model.generation_config.eos_token_id
        stops = stops if isinstance(stops, list) else [stops]
        try:
            self.writer.generate(ids, streamer=written, **options)
            if len(written.tokens) == self.new_tokens and written.tokens[-1] not in stops:
                ending = "cut"
        except KeyboardInterrupt:
            written.end()
            ending = "interrupted"
        self._tokens = ids[0].tolist() + written.tokens
        found = str(self.tokenizer.decode(written.tokens, skip_special_tokens=True))
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": found}]
        return found, ending

    def stats(self) -> dict[str, int]:
        """Tokens so far, bytes of the cache, and bytes of a key-value cache of these tokens in the model's dtype."""
        tokens, dtype = len(self._tokens), self.model.dtype
        if is_converted(self.model):
            plan = Converted.of(self.model).plan
            full, cache = plan.softmax_bytes(tokens, dtype), plan.cache_bytes(tokens, dtype)
        else:
            sites = attention_sites(self.model).values()
            numbers = sum(site.kv_heads * (site.head_dim + site.value_dim) for site in sites)
            cache = full = tokens * numbers * dtype.itemsize
        return {"tokens": tokens, "cache_bytes": cache, "full_bytes": full}

    def _prompt(self, text: str) -> Tensor:
        """Tokens [1, L] of all turns."""
        if self.templated:
            ids = templated(self.tokenizer, [*self._messages, {"role": "user", "content": text}])
        else:
            known = [token for token in self._tokens if token != self.tokenizer.eos_token_id]
            new = self.tokenizer(f"\n{text}" if known else text, add_special_tokens=not known)["input_ids"]
            ids = torch.tensor([known + new], dtype=torch.int64)
        return ids.to(device_of(self.model))


def templated(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> Tensor:
    """The token ids [1, L] of messages in the tokenizer's chat template; DoflaError if that does not work."""
    options: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        read = tokenizer.apply_chat_template(messages, **options)
        return cast("Mapping[str, Tensor]", read)["input_ids"]  # so the options say
    except Exception as error:  # a template is a program, and fails in any way
        raise DoflaError(f"the tokenizer's chat template does not work ({error}): mend it, or leave it out") from error


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
