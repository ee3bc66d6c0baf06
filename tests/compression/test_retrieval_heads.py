"""Retrieval heads: the KV heads that hold every token, those that needles are found with."""

import pytest
import torch
from sizes import size_of

import dofla
from dofla.compression import retrieval
from dofla.compression.plan import compressed_plan
from dofla.compression.retrieval import by_layer, rank_heads
from dofla.compression.target import Target
from dofla.data.facts import Facts
from dofla.distillation.objective import Objective
from dofla.errors import DoflaError
from dofla.integration.converted import Converted

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
    assert seen[-1] == ("retrieval heads", 2, 2)
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


def test_what_costs_most_of_text_or_of_needles_comes_first(tiny, tokenizer, monkeypatch):
    model = reader(tiny)
    # As much as half of what text costs and nothing of needles; or with twice the bytes a third of what needles cost.
    shares = {FIRST: [1.0, 1.0], SECOND: [2.0, 1.0]}
    costs = {FIRST: [0.5, 0.3], SECOND: [0.2, 0.0]}
    needles, asked = Facts.among(windows(tiny), tokenizer, REACH), []
    found = {FIRST: torch.tensor([0.0, 0.1]), SECOND: torch.tensor([0.4, 0.1])}
    monkeypatch.setattr(
        retrieval, "eviction_costs", lambda _, batches, report, last: asked.append((len(batches), last)) or found
    )
    compressed = Converted.of(tiny.compressed(model))
    order = [(SECOND, 0), (FIRST, 0), (FIRST, 1), (SECOND, 1)]  # 1.0, 0.5, 0.4, 0.1
    assert rank_heads(compressed, shares, costs, needles, lambda: None) == order
    assert asked == [(2, needles.asked)]
    assert by_layer(order[:3]) == {FIRST: [0, 1], SECOND: [0]}


def test_only_what_is_asked_counts(tiny):
    model, tokens = tiny.llama().double(), tiny.tokens(2, 32)
    student = dofla.linear.linearize(model, tiny.plan(model, 8))
    batch, whole = {"input_ids": tokens}, Objective(student, lambda: dofla.original(student))
    for last in (1, 5, 31, 40):
        part = Objective(student, lambda: dofla.original(student), last)
        count = min(last, 31)
        assert part.count(batch) == 2 * count
        with torch.no_grad():
            ours = student(tokens).logits[:, :-1].log_softmax(-1)
            with dofla.original(student):
                theirs = student(tokens).logits[:, :-1].log_softmax(-1)
            expected = (theirs.exp() * (theirs - ours)).sum(-1)[:, -count:].mean()
            assert part(batch, 2 * count, 2).item() == pytest.approx(expected.item(), rel=1e-4)
    assert whole.count(batch) == 62
    assert Converted.of(student).layers


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
