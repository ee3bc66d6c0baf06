"""Calls of generate from several threads write together what each would write alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes

COMPRESSED = {"features": 0, "window": 4, "sinks": 2, "feature_map": "none", "token_dtype": "int8"}
SIZES = {
    "features": {"features": 4},
    "hybrid": {"features": [3, 5], "window": 3, "sinks": 2},
    "coded_tiers": COMPRESSED | {"tiers": [[[5, 4.0], [4, 3.0]], [[3, 3.0]]], "heavy_hitters": [6, 0]},
    "features behind tiers": COMPRESSED
    | {"features": 3, "feature_map": "exponential", "tiers": [[5, 3.0]], "heavy_hitters": 4},
}


def students(tiny, sizes, count=2, family="llama"):
    """The same student several times, in float64: sums in another order change no token."""
    models = [getattr(tiny, family)().double().eval() for _ in range(count)]
    return [dofla.linearize(model, tiny.plan(model, **sizes)) for model in models]


def written(student, ids, tokens, **options):
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False} | options
    return student.generate(ids, attention_mask=torch.ones_like(ids), **options)


def all_at_once(calls):
    """What calls return that run at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(call) for call in calls]
        return [future.result(timeout=60) for future in running]


class Meeting(LogitsProcessor):
    """Lets no call go on before all have come as far as their first token."""

    def __init__(self, calls):
        self.barrier, self.met = threading.Barrier(calls, timeout=60), threading.local()

    def __call__(self, input_ids, scores):
        if not getattr(self.met, "done", False):
            self.met.done = True
            self.barrier.wait()
        return scores


def meeting(calls):
    return LogitsProcessorList([Meeting(calls)])


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in SIZES), ("features", "gpt2")])
def test_each_call_writes_what_it_would_write_alone(tiny, kind, family):
    student, plain = students(tiny, SIZES[kind], family=family)
    batching = dofla.continuous_batching(student)
    prompts = [tiny.tokens(1, length, seed=length) for length in (3, 11, 40)]
    lengths = [12, 5, 9]  # they end at different times
    options = {"logits_processor": meeting(len(prompts)), "tokenizer": object()}  # which forward gets to see as well
    seen = []
    own = student.model.layers[0] if family == "llama" else student.transformer.h[0]
    own.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    found = all_at_once([partial(written, student, *each, **options) for each in zip(prompts, lengths, strict=True)])
    for ids, n, sequence in zip(prompts, lengths, found, strict=True):
        assert torch.equal(sequence, written(plain, ids, n))
    # Three prompts, then tokens: 4 of all three (the last one written is not read), 4 of two, 3 of the longest answer.
    assert sorted(seen) == sorted([(1, len(ids[0])) for ids in prompts] + [(3, 1)] * 4 + [(2, 1)] * 4 + [(1, 1)] * 3)
    assert batching.rows == 2


def test_a_call_that_comes_later_joins_and_its_cache_is_its_own(tiny):
    student, plain = students(tiny, SIZES["coded_tiers"])
    dofla.continuous_batching(student)
    first, second = (tiny.tokens(1, length, seed=length) for length in (20, 9))
    started, joined = threading.Event(), threading.Event()

    class Waiting(LogitsProcessor):
        """Of the first call, from its third token on: until the second is done."""

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 22:
                started.set()
                assert joined.wait(60)
            return scores

    def late():
        assert started.wait(60)
        joined.set()
        cache = dofla.read_prompt(student, second[:, :-1])
        return written(student, second, 4, past_key_values=cache), cache

    early, (after, cache) = all_at_once(
        [lambda: written(student, first, 30, logits_processor=LogitsProcessorList([Waiting()])), late]
    )
    assert torch.equal(early, written(plain, first, 30))
    alone = dofla.read_prompt(plain, second[:, :-1])
    assert torch.equal(after, written(plain, second, 4, past_key_values=alone))
    assert cache_bytes(cache) == cache_bytes(alone)
    assert cache.get_seq_length() == alone.get_seq_length() == 12
    for own, other in zip(cache.layers, alone.layers, strict=True):
        for state, expected in zip(own.states, other.states, strict=True):
            assert torch.equal(state.tokens, expected.tokens)  # codes, bit for bit


def test_sessions_go_on_side_by_side(tiny):
    student, plain = students(tiny, SIZES["coded_tiers"])
    dofla.continuous_batching(student)
    sessions = dofla.keep_sessions(student)
    texts = [tiny.tokens(1, 20 + n, seed=n) for n in range(3)]
    for turn in range(2):
        said = all_at_once([partial(written, student, ids, 8) for ids in texts])
        for ids, sequence in zip(texts, said, strict=True):
            assert torch.equal(sequence, written(plain, ids, 8))
        assert sessions.read == 4 if turn else sessions.read >= 19
        texts = [torch.cat([x, tiny.tokens(1, 4, seed=10 * turn + n)], 1) for n, x in enumerate(said)]


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"padded": True}]
)
def test_what_is_no_single_text_is_written_beside_the_others(tiny, options):
    student, plain = students(tiny, SIZES["coded_tiers"])
    dofla.continuous_batching(student)
    ids, other = tiny.tokens(2, 12), tiny.tokens(1, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    padded = {"attention_mask": mask} if options.pop("padded", False) else {"attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | padded | options

    def several(model):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return model.generate(ids, **options)

    found, alone = all_at_once([lambda: several(student), lambda: written(student, other, 8)])
    assert torch.equal(alone, written(plain, other, 8))
    assert torch.equal(found, several(plain)) or options["do_sample"]


def test_what_one_call_raises_leaves_the_others_alone(tiny):
    student, plain = students(tiny, SIZES["coded_tiers"])
    dofla.continuous_batching(student)

    class Stumbling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 12:
                raise KeyError("stumbled")
            return scores

    ids, together = tiny.tokens(1, 8), Meeting(2)
    calls = [
        lambda: written(student, ids, 9, logits_processor=LogitsProcessorList([together, Stumbling()])),
        lambda: written(student, ids, 9, logits_processor=LogitsProcessorList([together])),
    ]
    with ThreadPoolExecutor(2) as threads:
        stumbles, goes_on = (threads.submit(call) for call in calls)
        with pytest.raises(KeyError, match="stumbled"):
            stumbles.result(60)
        assert torch.equal(goes_on.result(60), written(plain, ids, 9))


def test_what_a_pass_raises_all_its_calls_hear(tiny):
    student, plain = students(tiny, SIZES["coded_tiers"])
    dofla.continuous_batching(student)
    ids, together = tiny.tokens(1, 8), meeting(2)

    def refuse(_, args):
        if args[0].shape[0] == 2:
            raise MemoryError("no room")

    handle = student.model.layers[1].register_forward_pre_hook(refuse)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(written, student, ids, 9, logits_processor=together) for _ in range(2)]:
            with pytest.raises(MemoryError, match="no room"):
                future.result(60)
    handle.remove()
    assert torch.equal(written(student, ids, 9), written(plain, ids, 9))


def test_gradients_pass_as_ever(tiny):
    student, plain = students(tiny, {"features": 4})
    dofla.continuous_batching(student)
    ids = tiny.tokens(2, 12)
    losses = [model(ids, labels=ids).loss for model in (student, plain)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    own, other = (model.model.layers[0].mlp.up_proj.weight.grad for model in (student, plain))
    assert torch.equal(own, other)


def test_what_writes_nothing_is_refused(tiny):
    with pytest.raises(DoflaError, match="linearize"):
        dofla.continuous_batching(tiny.llama())
    encoder = tiny.bert()
    dofla.linearize(encoder, tiny.plan(encoder, features=4))
    with pytest.raises(DoflaError, match="writes no text"):
        dofla.continuous_batching(encoder)
