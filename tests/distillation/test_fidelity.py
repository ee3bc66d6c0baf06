"""Fidelity of each layer's attention against attention written out."""

from dataclasses import asdict

import pytest
import torch
from students import keep_softmax, student_of

import dofla
from dofla.attention import rounded
from dofla.data import TokenWindows, as_windows
from dofla.distillation.fidelity import attention_fidelity
from dofla.integration.converted import Converted
from dofla.integration.recorder import recording

LENGTH = 18


def by_hand(student, batch):
    """From the recorded vectors, in float64 and with the kernel written out."""
    calls, figures = {}, {}
    layers = Converted.of(student).layers
    with recording(student, layers, lambda call: calls.update({call.name: call})), torch.no_grad():
        student.base_model(**batch)
    for name, call in calls.items():
        layer, length = layers[name], call.key.shape[2]
        share = call.query.shape[1] // call.key.shape[1]
        query = call.query.double()
        ours = [rounded(x) if layer.groups[0].int8 else x for x in (call.key, call.value)]
        key, value, our_key, our_value = (
            x.double().repeat_interleave(share, dim=1) for x in (call.key, call.value, *ours)
        )
        exact, approximate = (call.scaling * query @ x.mT for x in (key, our_key))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        for group in layer.groups:
            heads = [head * share + n for head in group.heads for n in range(share)]
            a = group.map.log_query(call.query[:, heads], call.scaling).double()
            b = group.map.log_key(ours[0][:, group.heads], call.scaling).double().repeat_interleave(share, dim=1)
            near = (distance if call.causal else distance.abs()) < group.window
            features = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), dim=-1)
            approximate[:, heads] = torch.where(near, approximate[:, heads], features)
        real = torch.ones(len(query), length) if call.weight is None else call.weight.double()
        hidden = (real[:, None, None, :] == 0) | ((distance < 0) & call.causal)
        teacher, found = (x.masked_fill(hidden, -1e9).log_softmax(-1) for x in (exact, approximate))
        rows = real[:, None, :].expand(-1, query.shape[1], -1)
        kl = (teacher.exp() * (teacher - found)).sum(-1) * rows
        of_heads = kl.sum((0, 2)).view(-1, share).sum(1) / (real.sum() * share)
        error = (teacher.exp() @ value - found.exp() @ our_value)[rows.bool()].square().sum()
        output = (teacher.exp() @ value)[rows.bool()].square().sum()
        unseen = hidden | (rows.unsqueeze(-1) == 0)
        kernel, estimate = (x.exp().masked_fill(unseen, 0) for x in (exact, approximate))
        relative = ((kernel - estimate).square().sum((0, 2, 3)) / kernel.square().sum((0, 2, 3))).sqrt()
        figures[name] = {
            "kl": (kl.sum() / rows.sum()).item(),
            "head_kl": of_heads.tolist(),
            "output_error": (error / output).sqrt().item(),
            "kernel_error": relative.log().mean().exp().item(),
        }
    return figures


def assert_close(got, expected):
    assert got.keys() == expected.keys()
    for name, layer in expected.items():
        assert got[name].keys() == layer.keys()
        for figure, value in layer.items():
            assert got[name][figure] == pytest.approx(value, rel=1e-3, abs=1e-6), (name, figure)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", {}),
        ("llama left", {"window": 3}),
        ("llama left", {"features": [2, 9], "window": [1, 5]}),  # heads are judged each by its own
        ("llama left", {"features": [2, 9], "window": [1, 5], "token_dtype": "int8"}),
        ("gpt2", {"window": 3, "token_dtype": "int8"}),
        ("gpt2 right", {}),
        ("bert", {"window": 3}),
        ("bert right", {"window": 3, "token_dtype": "int8"}),
        ("vit", {}),
        ("vit", {"window": 3, "token_dtype": "int8"}),
    ],
)
def test_fidelity_is_divergence_and_output_error_over_all_real_rows(tiny, kind, plan):
    kind, _, side = kind.partition(" ")
    student = student_of(tiny, kind, **plan)
    batch = {"input_ids": tiny.tokens(5, LENGTH)}
    if side:
        batch = tiny.padded(5, LENGTH, side)
    if kind == "vit":
        batch = tiny.images(5)
    got = attention_fidelity(Converted.of(student), as_windows(batch), batch_size=2)
    assert_close({name: asdict(layer) for name, layer in got.items()}, by_hand(student, batch))
    for layer in got.values():
        assert min(*layer.head_kl, layer.kl, layer.output_error, layer.kernel_error) > 1e-3
        assert layer.kl == pytest.approx(sum(layer.head_kl) / len(layer.head_kl))


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("plan", [{"window": LENGTH}, {"sinks": LENGTH}])
def test_exact_attention_is_perfectly_faithful(tiny, kind, plan):
    student = student_of(tiny, kind, **plan)
    for layer in attention_fidelity(Converted.of(student), as_windows(tiny.padded(3, LENGTH))).values():
        assert layer.kl == pytest.approx(0, abs=1e-6)
        assert layer.output_error == pytest.approx(0, abs=1e-5)


def test_only_linear_layers_are_compared(tiny):
    model = tiny.llama()
    dofla.linear.linearize(model, keep_softmax(tiny.plan(model), 0))
    figures = attention_fidelity(Converted.of(model), TokenWindows.of(tiny.tokens(2, LENGTH)))
    assert list(figures) == ["model.layers.1.self_attn"]


def test_the_teachers_inputs_are_compared_whatever_earlier_layers_became(tiny):
    windows = TokenWindows.of(tiny.tokens(3, LENGTH))
    good, bad = student_of(tiny, "llama"), student_of(tiny, "llama")
    first = "model.layers.0.self_attn"
    with torch.no_grad():
        Converted.of(bad).layers[first].maps[0].z.mul_(3)
    ours, theirs = (attention_fidelity(Converted.of(student), windows) for student in (good, bad))
    assert ours[first] != theirs[first]
    assert ours["model.layers.1.self_attn"] == theirs["model.layers.1.self_attn"]


def test_rows_of_long_windows_are_drawn_by_the_seed(tiny):
    student, windows = student_of(tiny, "llama"), TokenWindows.of(tiny.tokens(2, 160))
    one, same, other = (attention_fidelity(Converted.of(student), windows, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    for name, layer in by_hand(student, {"input_ids": windows.input_ids}).items():
        for figure, value in layer.items():
            assert getattr(one[name], figure) == pytest.approx(value, rel=0.1)
