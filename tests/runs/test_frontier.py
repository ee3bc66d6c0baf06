"""How many bytes a model needs."""

import json

import pytest
import torch
from sizes import compress, size_of

import dofla
from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.runs.frontier import ADAPTERS, FRONTIER, Frontier, Point, _next

KIB = 1024
SIZES = [16 * KIB, 32 * KIB, 64 * KIB]
CACHE = {64: 10**6, 128: 2 * 10**6}


def frontier(model, tokens, texts, *, sizes, **options):
    """:func:`dofla.frontier` of sizes given in tokens per KV head."""
    return dofla.frontier(model, tokens, texts, sizes=[size_of(model, n) for n in sizes], **options)


def windows(tiny, count, length, seed=0):
    return dofla.TokenWindows.of(tiny.tokens(count, length, seed=seed))


def points(losses, length=64, text="a"):
    return [Point(KIB * size, 100 * size, text, length, loss, [loss, loss], loss) for size, loss in losses.items()]


def test_every_budget_is_judged_on_every_text_at_every_length(tiny):
    model, tokens = tiny.llama(), windows(tiny, 3, 64)
    judged = {text: [windows(tiny, 2, n, seed=n + len(text)) for n in (40, 80)] for text in ("a", "bc")}
    seen = []
    found = frontier(model, tokens, judged, sizes=[24, 12], progress=lambda *report: seen.append(report))
    tried = [(x.size, x.text, x.length) for x in found.points]
    assert tried == [(size_of(model, b), text, n) for b in (12, 24) for text in ("a", "bc") for n in (40, 80)]
    assert [report for report in seen if report[0] == "sizes"] == [("sizes", 1, 2), ("sizes", 2, 2)]
    once = 6 * ["directions"] + ["copies"] + 4 * ["head budgets"] + ["importance"]
    assert [report[0] for report in seen if report[0] != "sizes"] == once  # calibration serves both
    assert not hasattr(model, "_dofla_softmax_implementation")
    student = compress(model, tokens, 12)
    for point, one in zip(found.points, [x for own in judged.values() for x in own], strict=False):
        result = dofla.evaluate(student, one)
        assert (point.loss_increase, point.kl, point.bytes) == (
            result.loss_increase,
            result.kl,
            Converted.of(student).plan.state_bytes(model.dtype),
        )
    assert found.cache == {length: Converted.of(student).plan.softmax_bytes(length, model.dtype) for length in (40, 80)}
    assert found.texts == ["a", "bc"]
    assert found.smallest(40) is None


def test_heads_that_hold_every_token_grow_beside_each_size(tiny, tokenizer):
    model, tokens = tiny.llama(vocab_size=2048), windows(tiny, 4, 96)
    options = {"context": 192, "retrieval_heads": 1, "tokenizer": tokenizer}
    found = frontier(model, tokens, {"a": [windows(tiny, 2, 64, seed=9)]}, sizes=[96, 144], **options)
    assert [x.size for x in found.points] == [size_of(model, 96), size_of(model, 144)]
    expected = {"source": "tensor", "tokens": 384, "retrieval_heads": 1}
    assert {key: found.made_from[key] for key in expected} == expected
    assert "retrieval heads, which grow beside the size: 1" in str(found)
    for point in found.points:
        plan = Converted.of(dofla.compress(model, tokens, point.size, **options)).plan
        assert plan.cache_bytes(64, model.dtype) == point.bytes
        assert plan.growing == 1
        dofla.restore(model)
    with pytest.raises(DoflaError, match="is too small for a token of each kind"):
        frontier(model, tokens, {"a": [windows(tiny, 2, 64, seed=9)]}, sizes=[2, 16], **options)


def test_what_was_found_is_kept(tiny, tmp_path):
    model, tokens = tiny.llama(), windows(tiny, 3, 64)
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base")
    judged = {"a": [windows(tiny, 2, 64, seed=9)]}
    alone = frontier(model, tokens, judged, sizes=[12, 24, 48], out=tmp_path / "all")
    sizes = {str(size_of(model, tokens)) for tokens in (12, 24, 48)}
    assert {path.name for path in (tmp_path / "all" / ADAPTERS).iterdir()} == sizes
    (only,) = frontier(model, tokens, judged, sizes=[12, 24, 48], target=100.0).points  # where it is met it stops
    assert only.size == size_of(model, 12)
    losses = sorted(x.loss for x in alone.points)
    assert losses[0] < losses[1]
    target = (losses[0] + losses[1]) / 2  # that the best alone is within
    found = frontier(model, tokens, judged, sizes=[12, 24, 48], target=target, out=tmp_path / "out")
    (kept,) = found.kept
    assert [path.name for path in (tmp_path / "out" / ADAPTERS).iterdir()] == [str(kept)]
    assert Frontier.load(tmp_path / "out") == found
    student = dofla.load(tmp_path / "out" / ADAPTERS / str(kept))
    assert Converted.of(student).plan.state_bytes(student.dtype) == found.smallest(64).bytes
    ids = judged["a"][0].input_ids
    with torch.no_grad():
        made = dofla.compress(model, tokens, kept)(ids, use_cache=False).logits
        assert torch.equal(student(ids, use_cache=False).logits, made)
    with pytest.raises(DoflaError, match="out exists already"):
        dofla.frontier(dofla.restore(model), tokens, judged, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("losses", "size"),
    [
        ({16: 0.16, 64: 0.01}, 46),  # 16 · 4^(log 8 / log 16)
        ({16: 0.08, 64: 1e-9}, 23),  # as if a hundredth of the target: 16 · 4^(log 4 / log 400)
        ({16: 0.08, 32: 0.0201, 64: 0.005}, 34),  # 33 would hardly be more than 32
        ({16: 0.08, 32: 0.02, 64: 0.005}, None),  # 32 just meets it
        ({60: 0.16, 64: 0.0199}, None),  # 64 would hardly be less
        ({16: 0.01, 64: 0.001}, None),
        ({16: 0.5, 64: 0.1}, None),
    ],
)
def test_between_two_budgets_it_tries_the_one_that_should_meet_the_target(losses, size):
    found = Frontier(points(losses), {64: 1}, 0.02)
    size = size and KIB * size
    assert found.between(64) == size
    assert _next(found, [KIB * n for n in losses]) == size


def test_it_goes_up_until_all_lengths_are_met_and_then_between_a_few_times():
    found = Frontier(points({16: 0.16}) + points({16: 0.01}, 128), CACHE, 0.02)
    assert _next(found, SIZES) == 32 * KIB
    found.points += points({32: 0.01}) + points({32: 0.3}, 128)  # chance: at 128 the smaller one was the better
    assert found.smallest(128) is None
    assert _next(found, SIZES) == 64 * KIB
    found.points += points({64: 0.01}) + points({64: 0.01}, 128)
    assert found.smallest(128).size == 64 * KIB
    assert _next(found, SIZES) == found.between(64) == 27 * KIB
    found.points += points({27: 0.02}) + points({27: 0.3}, 128)
    assert _next(found, SIZES) == found.between(128) == 56 * KIB
    found.points += [x for n in range(40, 45) for x in points({n: 0.03}, 128)]
    assert found.between(128) == 51 * KIB
    assert _next(found, SIZES) is None  # that is enough
    assert _next(Frontier([], {}), SIZES) == 16 * KIB
    assert _next(Frontier(points({16: 1.0, 32: 1.0, 64: 1.0}), {64: 1}), SIZES) is None


def test_the_worst_text_and_the_larger_of_gap_and_kl_decide():
    lucky = Point(64 * KIB, 6400, "b", 64, -0.001, [-0.01, 0.01], 0.03)
    found = Frontier([*points({16: 0.5, 32: 0.2, 64: 0.01}), lucky, *points({32: 0.1}, text="b")], {64: 1}, 0.02)
    assert [(x.size, x.text) for x in found.at(64)] == [(n, text) for n, text in zip(SIZES, "aab", strict=True)]
    assert found.smallest(64) is None
    found.points += points({128: 0.001}) + points({128: 0.015}, text="b")
    assert found.smallest(64).size == 128 * KIB
    assert found.smallest(64).text == "b"


def test_what_is_said_of_the_smallest():
    found = Frontier(points({16: 0.3, 64: 0.01}) + points({16: 0.5, 64: 0.2}, 128), CACHE, 0.02)
    suffices = "6.2 KiB suffices at 64 tokens: 156 x smaller than the original's cache, perplexity +1.01 %."
    assert suffices in found.verdict()
    assert "No size tried is within 0.02 nats per token at 128 tokens: 6.2 KiB" in found.verdict()
    assert " ".join(str(found).split()).startswith(found.verdict())
    met = Frontier(points({16: 0.01, 64: 0.01}), {64: 10**6}, 0.02)
    assert met.verdict().endswith("It is the smallest size tried, so less may suffice.")
    assert Frontier(points({16: 0.01, 64: 0.01}), {64: 10**6}).verdict().startswith("At 64 tokens, ")


def test_a_damaged_file(tmp_path):
    with pytest.raises(DoflaError, match=r"frontier\.json"):
        Frontier.load(tmp_path)
    (tmp_path / FRONTIER).write_text(json.dumps({"cache": {"64": 1}, "points": [{"size": 3}], "format": 4}))
    with pytest.raises(DoflaError, match="holds no frontier"):
        Frontier.load(tmp_path)


def test_bad_input(tiny):
    model, tokens = tiny.llama(), windows(tiny, 2, 32)
    for texts, options, message in [
        ({"a": [tokens, tokens]}, {}, r"'a' of \[32, 32\] tokens: give each text one set of windows"),
        ({"a": [tokens], "b": []}, {}, r"'a' of \[32\] tokens, 'b' of \[\] tokens: give each text"),
        ({}, {}, "windows to evaluate on: none"),
        ({"a": [tokens]}, {"sizes": []}, "no size to try"),
        ({"a": [tokens]}, {"context": 16}, "context is 16, and texts have 32 tokens: give as many"),
        ({"a": [tokens]}, {"retrieval_heads": 1}, "retrieval_heads is 1: give the tokenizer too"),
        ({"a": [tokens]}, {"target": 0}, "target is 0: give what may be lost, above 0"),
    ]:
        with pytest.raises(DoflaError, match=message):
            dofla.frontier(model, tokens, texts, **options)


def test_a_folder_that_exists_is_refused_before_anything_is_measured(tiny, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").touch()
    monkeypatch.setattr("dofla.runs.frontier.measure", None)
    tokens = windows(tiny, 2, 32)
    with pytest.raises(DoflaError, match="exists already"):
        dofla.frontier(tiny.llama(), tokens, {"a": [tokens]}, sizes=["9KB"], out=tmp_path)
