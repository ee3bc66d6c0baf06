"""Retrieval heads: the KV heads that hold every token, those that needles are found with."""

import pytest
import torch
from sizes import size_of

import dofla
from dofla.compression.plan import compressed_plan
from dofla.compression.retrieval import by_layer, rank_heads
from dofla.compression.target import Target
from dofla.data.facts import Facts
from dofla.errors import DoflaError
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
    assert f"retrieval heads, the first ten: {' '.join(map(str, found.retrieval[0]))}" in str(found)
    size, target = size_of(model, 120), Target.of(model, REACH)
    before, plan = (compressed_plan(target, size, head_budgets=found.head_budgets(count)) for count in (0, 1))
    held, held_before = slots(plan), slots(before)
    first = found.retrieval[0]
    assert held[first] == REACH
    assert all(held[place] <= held_before[place] for place in held.keys() - {first})
    assert plan.state_bytes(model.dtype) <= size
    assert plan.made_by["retrieval_heads"] == {first[0]: [first[1]]}
    options = {"context": REACH, "retrieval_heads": 1}
    assert Converted.of(dofla.compress(model, size=size, calibration=found, **options)).plan == plan
    assert model.generate(tokens.input_ids[:1, :8], max_new_tokens=4).shape == (1, 12)
    dofla.restore(model)
    assert Converted.of(dofla.compress(model, tokens, size, tokenizer=tokenizer, **options)).plan == plan


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
    assert found == sorted(wanted, key=wanted.get, reverse=True)
    assert len(reports) == 4  # layers of documents
    assert by_layer([(SECOND, 0), (FIRST, 1), (FIRST, 0)]) == {FIRST: [0, 1], SECOND: [0]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retrieval_heads": -1}, "retrieval_heads is -1: give how many"),
        ({"retrieval_heads": 5}, "retrieval_heads is 5: the model has 4 KV heads"),
        ({"retrieval_heads": 1, "tokenizer": None}, "retrieval_heads is 1: give the tokenizer too"),
        ({"retrieval_heads": 4}, "4 retrieval heads would take more than 50% of the bytes: give a larger size, fewer"),
        (
            {"retrieval_heads": 1, "calibration": True, "tokenizer": None},
            "retrieval_heads is 1: give the tokenizer too",
        ),
        ({"retrieval_heads": 1, "calibration": True}, "retrieval_heads is 1, and the calibration ranks none"),
    ],
)
def test_refusals(tiny, tokenizer, options, message):
    model, tokens = reader(tiny), windows(tiny)
    options = {"context": REACH, "tokenizer": tokenizer} | options
    if options.get("calibration"):
        options["calibration"] = dofla.calibrate(model, tokens, head_budgets="even")
    with pytest.raises(DoflaError, match=message):
        dofla.compress(model, tokens, size_of(model, 100), **options)
    assert not hasattr(model, "_dofla_softmax_implementation")


def test_without_positions_a_context_is_needed(tiny, tokenizer, monkeypatch):
    monkeypatch.setattr("dofla.compression.target.positions_of", lambda _: None)
    with pytest.raises(DoflaError, match="states no number of positions: give context"):
        dofla.compress(reader(tiny), windows(tiny), 9000, retrieval_heads=1, tokenizer=tokenizer)
