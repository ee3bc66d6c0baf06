"""NVIDIA's kvpress on the windows that continuation.py wrote: rows for its table.

    python -m venv build/peers && build/peers/bin/pip install -r benchmarks/peers/requirements.txt
    build/peers/bin/python benchmarks/peers/presses.py --model models/smollm2-135m runs/peers-2048

Runs in an environment of its own, since kvpress wants an older transformers, and imports nothing of dofla. Of a press
there may be three rows:

- once: the cache is compressed at the end of the prompt, to as many tokens as have the bytes of dofla's state in
  bfloat16, and then grows;
- as-if: twice the tokens, unrounded, as if they took eight bits a number and those were as good as sixteen;
- held: kvpress's DecodingPress keeps it constant from then on; whenever it is full it goes back to four fifths.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from judging import WRITTEN, Row, filled, loss_of, read_prompt, read_rows, read_texts, token_bytes
from kvpress import (
    AdaKVPress,
    BasePress,
    DecodingPress,
    ExpectedAttentionPress,
    KVzipPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

PRESSES: dict[str, Callable[[float], BasePress]] = {
    "StreamingLLM": StreamingLLMPress,
    "SnapKV": SnapKVPress,
    # Its 64 newest tokens, by default, leave few places of a small memory to others, and none to the first tokens.
    "SnapKV(32)": partial(SnapKVPress, window_size=32),
    "TOVA": TOVAPress,
    "ExpectedAttention": ExpectedAttentionPress,
    "AdaKV(ExpectedAttention)": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=1e-2)),
    "KVzip": KVzipPress,
}
"""By the part of the pairs to take away. All but the last decide while the prompt is read, layer by layer."""
KINDS = {
    "once": ["StreamingLLM", "SnapKV", "SnapKV(32)", "TOVA", "ExpectedAttention", "AdaKV(ExpectedAttention)"],
    "as-if": ["SnapKV", "ExpectedAttention"],
    # Of the others, what a DecodingPress shows them of the newest queries and of the order of tokens is not enough.
    "held": ["TOVA"],
    "kvzip": ["KVzip"],
}
NOTES = {"as-if": ", int8, as if", "held": ", held", "question known": ", question known"}
ONCE, CONSTANT = "compressed once, then grows", "constant after the prompt"


@dataclass(frozen=True)
class Trial:
    """A press of :data:`PRESSES`, used in one of the ways of :data:`KINDS`, that is to leave ``kept`` tokens."""

    press: str
    kind: str
    limit: int
    kept: int

    def row(self, texts: dict[str, Tensor], each: int) -> Row:
        """Still without losses; ``each``: bytes of a token in bfloat16."""
        each //= 2 if self.kind == "as-if" else 1
        before = self.kept * each
        if self.kind == "held":
            return Row(self.memory, CONSTANT, self.limit, before, before, {text: [] for text in texts})
        after = before + WRITTEN * each
        return Row(self.memory, ONCE, self.limit, before, after, {text: [] for text in texts})

    @property
    def memory(self) -> str:
        """Its name in tables."""
        return self.press + NOTES.get(self.kind, "")

    def holding(self) -> DecodingPress:
        """What goes back to :attr:`least` tokens after each call."""
        return DecodingPress(PRESSES[self.press](0.0), compression_interval=1, target_size=self.least)

    @property
    def least(self) -> int:
        """Tokens after each compression."""
        return self.kept - self.kept // 5 if self.kind == "held" else self.kept


def ratio_to(kept: int, prompt: int) -> float:
    """Of which kvpress, which rounds down, keeps so many tokens of a prompt."""
    return max(0.0, 1 - (kept + 0.5) / prompt)


@dataclass
class Memory:
    """What a press leaves of a prompt: keys and values of each layer, and, where heads keep different numbers, the
    places that kvpress hides from attention instead of taking them away."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    hidden: list[tuple[Tensor, ...] | None] = field(default_factory=list)

    def cache(self, model: PreTrainedModel) -> Cache:
        """As it is to be written to."""
        self.hide(model)
        return filled(self.pairs, DynamicCache(config=model.config))

    def hide(self, model: PreTrainedModel) -> None:
        """What kvpress hides, until another memory's is."""
        for module, places in zip(attention(model), self.hidden, strict=True):
            module.masked_key_indices = places


def attention(model: PreTrainedModel) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


@contextmanager
def compressing(model: PreTrainedModel, presses: list[BasePress]) -> Iterator[list[Memory]]:
    """While a prompt is read: the memories of all presses from that one reading, each as if it were alone."""
    memories = [Memory() for _ in presses]

    def look(module: nn.Module, _: tuple, known: dict, output: tuple) -> None:
        layer = known["past_key_values"].layers[module.layer_idx]
        for press, memory in zip(presses, memories, strict=True):
            module.masked_key_indices = None
            memory.pairs.append(
                press.compress(module, known["hidden_states"], layer.keys, layer.values, output[1], known)
            )
            memory.hidden.append(module.masked_key_indices)
        module.masked_key_indices = None

    with ExitStack() as stack:
        for press in presses:
            press.post_init_from_model(model)
        for module in attention(model):
            module.rotary_emb = model.model.rotary_emb
            stack.callback(module.register_forward_hook(look, with_kwargs=True).remove)
        yield memories


@torch.no_grad()
def read_within(model: PreTrainedModel, ids: Tensor, press: BasePress) -> tuple[Memory, Tensor]:
    """What one press leaves of these tokens [1, L], in kvpress's own way, and the logits [1, V] after them."""
    cache = DynamicCache(config=model.config)
    with press(model):
        states = model.model(input_ids=ids, past_key_values=cache).last_hidden_state
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    hidden = [getattr(module, "masked_key_indices", None) for module in attention(model)]
    return Memory(pairs, hidden), model.lm_head(states[:, -1])


@torch.no_grad()
def judge(model: PreTrainedModel, window: Tensor, trials: list[Trial]) -> list[float]:
    """Loss of each trial on a window [1, L], from one reading of its prompt."""
    prompt, losses = window.shape[1] - WRITTEN, []
    with compressing(model, [PRESSES[x.press](ratio_to(x.least, prompt)) for x in trials]) as memories:
        _, first = read_prompt(model, window)
    for trial in trials:
        cache = memories.pop(0).cache(model)
        if trial.kind != "held":
            losses.append(loss_of(model, cache, first, window))
            continue
        # A call with all tokens until the next compression is one step of the press, and the same as token by token.
        with trial.holding()(model):
            losses.append(loss_of(model, cache, first, window, chunk=trial.kept - trial.least))
    return losses


@torch.no_grad()
def judge_kvzip(model: PreTrainedModel, window: Tensor, trials: list[Trial]) -> list[float]:
    """The same for KVzip, which decides over all layers together, after it has read the prompt again."""
    losses = []
    for trial in trials:
        press = PRESSES[trial.press](ratio_to(trial.kept, window.shape[1] - WRITTEN))
        memory, first = read_within(model, window[:, :-WRITTEN], press)
        losses.append(loss_of(model, memory.cache(model), first, window))
    return losses


def fill(
    model: PreTrainedModel, folder: Path, kinds: list[str], losses: Callable[..., list[float]], most: int | None
) -> None:
    """Write the rows of these kinds that are not there, of at most so many windows; a run that is stopped leaves those
    of the windows it got to."""
    texts, limits = read_texts(folder)
    each, count = token_bytes(model), min(map(len, texts.values()))
    count = min(count, most or count)
    done = {name for name, row in read_rows(folder).items() if min(map(len, row.losses.values())) >= count}
    rows = {}
    for limit, kind in itertools.product(limits, kinds):
        for press in KINDS[kind]:
            trial = Trial(press, kind, limit, limit // each * (2 if kind == "as-if" else 1))
            if (row := trial.row(texts, each)).name not in done:
                rows[trial] = row
    for number in range(count if rows else 0):
        for text, windows in texts.items():
            for row, loss in zip(rows.values(), losses(model, windows[number, None], list(rows)), strict=True):
                row.losses[text].append(loss)
        for row in rows.values():
            row.write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub name, as for continuation.py")
    parser.add_argument("folder", type=Path, help="that continuation.py wrote")
    parser.add_argument("--windows", type=int, help="of each text; default: all")
    parser.add_argument("--kind", action="append", choices=KINDS, help="repeatable; default: all")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    kinds = options.kind or list(KINDS)
    fill(model, options.folder, [kind for kind in kinds if kind != "kvzip"], judge, options.windows)
    fill(model, options.folder, [kind for kind in kinds if kind == "kvzip"], judge_kvzip, options.windows)


if __name__ == "__main__":
    main()
