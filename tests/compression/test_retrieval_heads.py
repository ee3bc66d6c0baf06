"""Retrieval heads: the KV heads that hold every token, those that needles are found with; and caches of such alone."""

import math
from dataclasses import replace

import pytest
import torch
from sizes import size_of

import dofla
from dofla.compression.retrieval import by_layer, count_of, rank_heads
from dofla.compression.target import Target
from dofla.data.facts import Facts
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording, run_body

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
REACH = 192


def reader(tiny, **config):
    """A model with the vocabulary of the demo's tokenizer."""
    return tiny.llama(vocab_size=2048, **config)


def windows(tiny):
    return dofla.TokenWindows.of(tiny.tokens(4, 96))


def slots(plan):
    """Tokens that each KV head holds at most."""
    return {(layer.name, head): n for layer in plan.layers for head, n in enumerate(layer.slots)}


def test_they_hold_every_token_and_the_others_pay(tiny, tokenizer):
    model, tokens, seen = reader(tiny), windows(tiny), []
    without = dofla.calibrate(model, tokens, context=REACH)
    found = dofla.calibrate(model, tokens, context=REACH, tokenizer=tokenizer, progress=lambda *x: seen.append(x))
    assert seen[-1][0] == "retrieval heads"
    assert (found.shares, found.costs) == (without.shares, without.costs)
    assert sorted(found.retrieval) == [(name, head) for name in (FIRST, SECOND) for head in range(2)]
    assert not hasattr(model, "_dofla_softmax_implementation")
    assert f"the first ten in rank: {' '.join(map(str, found.retrieval[0]))}" in str(found)
    size, target = size_of(model, 120), Target.of(model, REACH)
    before, plan = (found.plan(target, size, count) for count in (0, 1))
    held, held_before, first = slots(plan), slots(before), found.retrieval[0]
    assert held[first] == math.inf
    assert all(held[place] >= held_before[place] for place in held.keys() - {first})  # it needs no share
    assert plan.state_bytes(model.dtype) <= size
    assert plan.growing == 1
    assert plan.made_by["retrieval_heads"] == {first[0]: [first[1]]}
    assert "and of 1 KV heads that hold every token: " in str(plan)
    options = {"context": REACH, "retrieval_heads": 1}
    assert Converted.of(dofla.compress(model, size=size, calibration=found, **options)).plan == plan
    assert model.generate(tokens.input_ids[:1, :8], max_new_tokens=4).shape == (1, 12)
    dofla.restore(model)
    assert Converted.of(dofla.compress(model, tokens, size, tokenizer=tokenizer, **options)).plan == plan


@pytest.mark.parametrize(
    ("attention", "count"),
    [([0.4, 0.2, 0.1, 0.01] + [0.0] * 12, 3), ([0.9] * 16, 4), ([0.01] * 8, 0), ([], 0), ([0.3], 1)],
)
def test_as_many_as_attend_to_needles_and_a_quarter_of_all_at_most(attention, count):
    assert count_of(attention) == count


def test_by_default_there_are_as_many_as_the_calibration_found(tiny, tokenizer):
    model, tokens = reader(tiny), windows(tiny)
    found = dofla.calibrate(model, tokens, context=REACH, tokenizer=tokenizer)
    found = replace(found, attention=[0.5, 0.01, 0.0, 0.0])
    size = size_of(model, 60)
    for calibration, count in ((found, 1), (replace(found, retrieval=[], attention=[]), 0)):
        assert Converted.of(dofla.compress(model, size=size, calibration=calibration)).plan.growing == count
        dofla.restore(model)


def test_a_cache_that_evicts_nothing_takes_no_size_and_answers_nearly_as_the_original(tiny):
    model, tokens = reader(tiny), windows(tiny)
    for size in ({"size": 9000}, {"ratio": 4.0}):
        with pytest.raises(
            DoflaError, match=f"{next(iter(size))} is .* and evict is False: a cache that evicts nothing"
        ):
            dofla.compress(model, tokens, evict=False, **size)
    kl = {}
    for bits in (2.0, 3.0, 5.0):
        plan = Converted.of(dofla.compress(model, tokens, evict=False, bits=bits, head_budgets="even")).plan
        assert plan.growing == 4
        assert plan.made_by["evict"] is False
        kl[bits] = next_token_figures(model, tokens)["kl"]
        dofla.restore(model)
    assert kl[5.0] < kl[3.0] < kl[2.0]


def test_what_attends_most_to_what_is_asked_for_comes_first(tiny, tokenizer):
    model, needles, calls = reader(tiny), Facts.among(windows(tiny), tokenizer, REACH, count=2), []
    with torch.no_grad(), recording(model, [FIRST, SECOND], calls.append):
        for ids in needles.documents.input_ids:
            run_body(model, {"input_ids": ids[None]})
    wanted = dict.fromkeys([(name, head) for name in (FIRST, SECOND) for head in range(2)], 0.0)
    for n, call in enumerate(calls):
        weights, told = call.log_weights().exp()[0, :, -needles.asked :], needles.told[n // 2].tolist()
        there = torch.stack([weights[:, k, start:end].sum(-1) for k, (start, end) in enumerate(told)]).mean(0)
        for head in range(2):
            wanted[call.name, head] += there.view(2, -1)[head].max().item()
    reports = []
    found = rank_heads(model, [FIRST, SECOND], needles, lambda: reports.append(1))
    assert [*found] == sorted(wanted, key=wanted.get, reverse=True)
    assert found == pytest.approx({head: own / 2 for head, own in wanted.items()}, rel=1e-3)
    assert len(reports) == 4  # layers of documents
    assert by_layer([(SECOND, 0), (FIRST, 1), (FIRST, 0)]) == {FIRST: [0, 1], SECOND: [0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval_heads": -1}, "retrieval_heads is -1: give how many"),
        ({"retrieval_heads": 5}, "retrieval_heads is 5: the model has 4 KV heads"),
        ({"retrieval_heads": 1, "tokenizer": None}, "retrieval_heads is 1: give the tokenizer too"),
        ({"retrieval_heads": "all"}, "retrieval_heads is 'all': give how many"),
        (
            {"retrieval_heads": 1, "calibration": True, "tokenizer": None},
            "retrieval_heads is 1, and the calibration ranks none: calibrate with the tokenizer",
        ),
        ({"retrieval_heads": 1, "calibration": True}, "retrieval_heads is 1, and the calibration ranks none"),
    ],
)
def test_refusals(tiny, tokenizer, options, message):
    model, tokens = reader(tiny), windows(tiny)
    options = {"context": REACH, "tokenizer": tokenizer} | options
    if options.get("calibration"):
        tokens, options["calibration"] = None, dofla.calibrate(model, tokens, head_budgets="even")
    with pytest.raises(DoflaError, match=message):
        dofla.compress(model, tokens, size_of(model, 100), **options)
    assert not hasattr(model, "_dofla_softmax_implementation")
