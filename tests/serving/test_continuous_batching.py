"""Calls of generate from several threads write together what each would write alone."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LogitsProcessor, LogitsProcessorList

import dofla
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.serving import ContinuousBatching, Session, read_prompt

SIZES = {
    "features": {"features": 4},
    "hybrid": {"features": [3, 5], "window": 3, "sinks": 2},
    "compressed": {"window": [4, 3], "newest": [5, 3], "heavy_hitters": [6, 4]},
}


def model_of(tiny, kind="compressed", family="llama"):
    """In float64: sums in another order change no token."""
    model = getattr(tiny, family)().double().eval()
    if kind == "compressed":
        return tiny.compressed(model, **SIZES[kind])
    return dofla.linear.linearize(model, tiny.plan(model, **SIZES[kind]))


def written(writer, ids, tokens, **options):
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False} | options
    return writer.generate(ids, attention_mask=torch.ones_like(ids), **options)


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
    model = model_of(tiny, kind, family)
    prompts = [tiny.tokens(1, length, seed=length) for length in (3, 11, 40)]
    lengths = [12, 5, 9]  # they end at different times
    wanted = [written(model, ids, n) for ids, n in zip(prompts, lengths, strict=True)]
    options = {"logits_processor": meeting(len(prompts)), "tokenizer": object()}  # which forward gets to see as well
    seen = []
    own = model.model.layers[0] if family == "llama" else model.transformer.h[0]
    own.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    with ContinuousBatching(model) as batching:
        calls = [partial(written, batching, *each, **options) for each in zip(prompts, lengths, strict=True)]
        assert all(map(torch.equal, all_at_once(calls), wanted))
    # Three prompts, then tokens: 4 of all three (the last one written is not read), 4 of two, 3 of the longest answer.
    assert sorted(seen) == sorted([(1, len(ids[0])) for ids in prompts] + [(3, 1)] * 4 + [(2, 1)] * 4 + [(1, 1)] * 3)
    assert batching.rows == 2


def test_a_call_that_comes_later_joins_and_its_cache_is_its_own(tiny):
    model = model_of(tiny)
    first, second = (tiny.tokens(1, length, seed=length) for length in (20, 9))
    started, joined = threading.Event(), threading.Event()

    class Waiting(LogitsProcessor):
        """Of the first call, from its third token on: until the second is done."""

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 22:
                started.set()
                assert joined.wait(60)
            return scores

    with ContinuousBatching(model) as batching:

        def late():
            assert started.wait(60)
            joined.set()
            cache = read_prompt(batching.model, second[:, :-1])
            return written(batching, second, 4, past_key_values=cache), cache

        early, (after, cache) = all_at_once(
            [lambda: written(batching, first, 12, logits_processor=LogitsProcessorList([Waiting()])), late]
        )
    assert torch.equal(early, written(model, first, 12))
    alone = read_prompt(model, second[:, :-1])
    assert torch.equal(after, written(model, second, 4, past_key_values=alone))
    assert cache_bytes(cache) == cache_bytes(alone)
    assert cache.get_seq_length() == alone.get_seq_length() == 12
    for own, other in zip(cache.layers, alone.layers, strict=True):
        for state, expected in zip(own.states, other.states, strict=True):
            assert torch.equal(state.rows, expected.rows)  # codes, bit for bit


def test_conversations_go_on_side_by_side(tiny):
    model, texts = model_of(tiny), [tiny.tokens(1, 20 + n, seed=n) for n in range(2)]
    with ContinuousBatching(model) as batching:
        session = Session(batching)
        for turn in range(2):
            said = all_at_once([partial(written, session, ids, 4) for ids in texts])
            for ids, sequence in zip(texts, said, strict=True):
                assert torch.equal(sequence, written(model, ids, 4))
            assert session.read == 4 if turn else session.read >= 19
            texts = [torch.cat([x, tiny.tokens(1, 4, seed=10 * turn + n)], 1) for n, x in enumerate(said)]


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}, {"padded": True}]
)
def test_what_is_no_single_text_is_written_beside_the_others(tiny, options):
    model, ids, other = model_of(tiny), tiny.tokens(2, 12), tiny.tokens(1, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 1 - options.pop("padded", False)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0} | options

    def several(writer):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return writer.generate(ids, attention_mask=mask, **options)

    with ContinuousBatching(model) as batching:
        found, alone = all_at_once([lambda: several(batching), lambda: written(batching, other, 8)])
    assert torch.equal(alone, written(model, other, 8))
    assert torch.equal(found, several(model)) or options["do_sample"]


def test_what_one_call_raises_leaves_the_others_alone(tiny):
    model, ids, together = model_of(tiny), tiny.tokens(1, 8), Meeting(2)

    class Stumbling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 12:
                raise KeyError("stumbled")
            return scores

    processors = [together, Stumbling()], [together]
    with ContinuousBatching(model) as batching, ThreadPoolExecutor(2) as threads:
        stumbles, goes_on = (
            threads.submit(written, batching, ids, 9, logits_processor=LogitsProcessorList(own)) for own in processors
        )
        with pytest.raises(KeyError, match="stumbled"):
            stumbles.result(60)
        assert torch.equal(goes_on.result(60), written(model, ids, 9))


def test_what_a_pass_raises_all_its_calls_hear(tiny):
    model, ids, together = model_of(tiny), tiny.tokens(1, 8), meeting(2)

    def refuse(_, args):
        if args[0].shape[0] == 2:
            raise MemoryError("no room")

    model.model.layers[1].register_forward_pre_hook(refuse)
    with ContinuousBatching(model) as batching, ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(written, batching, ids, 9, logits_processor=together) for _ in range(2)]:
            with pytest.raises(MemoryError, match="no room"):
                future.result(60)
        assert torch.equal(written(batching, ids, 9), written(model, ids, 9))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_model_and_its_copies_stay_as_they_are(tiny, copied):
    model, ids = model_of(tiny), tiny.tokens(2, 12)
    before = [dict(vars(module)) for module in (model, model.model)]
    with ContinuousBatching(model) as batching:
        wanted = written(batching, ids[:1], 5)
        other = copied(model)
        assert torch.equal(written(other, ids[:1], 5), wanted)
        with torch.no_grad():
            other.lm_head.weight.neg_()
        assert torch.equal(written(batching, ids[:1], 5), wanted)
        assert not torch.equal(written(other, ids[:1], 5), wanted)
        model(ids, labels=ids).loss.backward()
    assert [dict(vars(module)) for module in (model, model.model)] == before
    with pytest.raises(DoflaError, match="the block of this ContinuousBatching has ended"):
        batching.generate(ids)


def test_peft_is_looked_into(tiny):
    model, ids = model_of(tiny), tiny.tokens(1, 12)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with ContinuousBatching(wrapped) as batching:
        for writer in (batching, Session(wrapped), Session(batching)):
            assert torch.equal(written(writer, ids, 5), wrapped.generate(input_ids=ids, max_new_tokens=5))


def test_what_writes_nothing_is_refused(tiny):
    with pytest.raises(DoflaError, match="linearize"):
        ContinuousBatching(tiny.llama())
    with pytest.raises(DoflaError, match="writes no text"):
        ContinuousBatching(dofla.linear.linearize(tiny.bert()))
