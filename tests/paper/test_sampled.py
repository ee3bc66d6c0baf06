"""Sampling the features of a whole model: what is drawn goes where it belongs, and nowhere else."""

import pytest
import torch
from students import student_of

from dofla.errors import DoflaError
from dofla.integration.converted import Converted
from dofla.integration.estimators import Reservoir
from dofla.integration.recorder import recording, run_body
from dofla.paper.sampled import sample_features
from dofla.paper.sampling import leverage_features

RAGGED = [6, 10]
FEW = {"samples": 40, "candidates": 64}


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_each_head_gets_the_draw_of_its_own_vectors(tiny):
    """Grouped-query heads, ragged M, padding: against one head after another by hand."""
    model, tokens = student(tiny, [10, 6]), tiny.padded(3, 12)
    layers = Converted.of(model).layers
    reservoirs = {name: Reservoir(40, 1, torch.Generator().manual_seed(5)) for name in layers}
    scalings = {}

    def look(call):
        scalings[call.name] = call.scaling
        reservoirs[call.name].add(call, ())

    with recording(model, layers, look), torch.inference_mode():
        run_body(model, tokens)
    generator = torch.Generator().manual_seed(5)
    before = parameters(model)
    assert sample_features(model, tokens, lam=0.01, seed=5, **FEW) is model
    for name, layer in layers.items():
        assert reservoirs[name].vectors.shape == (2, 40, 8)
        for head, count in enumerate([10, 6]):
            vectors = reservoirs[name].vectors[head]
            z, log_alpha = leverage_features(vectors, scalings[name], count, 0.01, candidates=64, generator=generator)
            (feature_map,) = (group.map for group in layer.groups if list(group.heads) == [head])
            torch.testing.assert_close(feature_map.z[0], z.float(), rtol=0, atol=0)
            torch.testing.assert_close(feature_map.log_alpha[0], log_alpha.float(), rtol=0, atol=0)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".dofla." in name}
    assert model(**tokens).logits.isfinite().all()


def test_heads_of_one_group_differ_and_the_seed_decides(tiny):
    models = [student(tiny, 8) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        sample_features(model, tiny.tokens(2, 24), seed=seed, **FEW)
    first, again, other = (next(iter(Converted.of(model).layers.values())).maps[0].z for model in models)
    assert first.shape == (2, 8, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_other_models(tiny):
    for kind, data in (("bert", tiny.padded(3, 12)), ("vit", tiny.images(2))):
        sampled = sample_features(student_of(tiny, kind), data, **FEW)
        assert sampled(**data).last_hidden_state.isfinite().all()
    half, seen = student(tiny).to(torch.bfloat16), []
    options = {"proposal": "gaussian", "batch_size": 2, "progress": lambda *step: seen.append(step)}
    sample_features(half, tiny.tokens(3, 24), **options, **FEW)
    assert seen == [("reading", 1, 2), ("reading", 2, 2), ("drawing", 1, 2), ("drawing", 2, 2)]
    assert next(iter(Converted.of(half).layers.values())).maps[0].z.dtype == torch.float32


def student(tiny, features=RAGGED, **plan):
    return student_of(tiny, features=features, **plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 1}, "samples is 1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"candidates": 7}, "candidates is 7, below the 10 features"),
        ({"proposal": "best"}, "unknown proposal 'best'"),
        ({"lam": -1.0}, "lam=-1.0"),
    ],
)
def test_numbers_out_of_range_change_nothing(tiny, options, said):
    model = student(tiny)
    before = parameters(model)
    with pytest.raises(DoflaError, match=said):
        sample_features(model, tiny.tokens(2, 8), **options)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_models_that_cannot_be_sampled_are_named(tiny):
    with pytest.raises(DoflaError, match="not converted"):
        sample_features(tiny.llama(), tiny.tokens(2, 8))
    with pytest.raises(DoflaError, match=r"layer model\.layers\.0\.self_attn has the feature map Elu1: only prf"):
        sample_features(student(tiny, 8, feature_map="elu1"), tiny.tokens(2, 8))
    empty = {"input_ids": tiny.tokens(2, 8), "attention_mask": torch.zeros(2, 8, dtype=torch.int64)}
    with pytest.raises(DoflaError, match=r"layer model\.layers\.0\.self_attn saw padding only"):
        sample_features(student(tiny), empty)
    broken = student(tiny)
    torch.nn.init.constant_(broken.model.layers[1].self_attn.k_proj.weight, float("nan"))
    with pytest.raises(DoflaError, match=r"the keys of layer model\.layers\.1\.self_attn hold NaN .* in batch 0"):
        sample_features(broken, tiny.tokens(2, 8))
