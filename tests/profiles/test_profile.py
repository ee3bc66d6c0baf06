"""Profiles: the sample they rest on, what they say of a model's attention, and their files."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from students import everything, student_of

import dofla
from dofla.errors import DoflaError
from dofla.integration.estimators import Reservoir
from dofla.integration.recorder import AttentionCall, recording
from dofla.linear import Profile
from dofla.profiles.profile import LayerProfile, SkippedLayer
from dofla.profiles.spectrum import Spectrum, degrees_of_freedom, gram_spectrum

ALL = 10_000
"""More samples than any text here has vectors."""
KV_HEADS, SHARE = 2, 3
PADDING = -1.0


def numbered_call(first: int, batch: int, length: int, padded: set[int] = frozenset()) -> AttentionCall:
    """A call whose vectors say what they are: (0 = key or 1 = query, number of the token, head)."""
    tokens = torch.arange(first, first + batch * length).view(batch, 1, length, 1).float()
    weight = torch.tensor([[n not in padded for n in row] for row in tokens.view(batch, length).long().tolist()])
    tokens = torch.where(weight[:, None, :, None], tokens, PADDING)

    def vectors(kind, heads):
        head = torch.arange(heads).view(1, heads, 1, 1).expand(batch, -1, length, -1)
        return torch.cat([torch.full_like(head, kind), tokens.expand(-1, heads, -1, -1), head], dim=-1).float()

    query, key = vectors(1, KV_HEADS * SHARE), vectors(0, KV_HEADS)
    return AttentionCall("a", query, key, key, weight if padded else None, 1.0, True)


def sample(size: int, seed: int, calls: list[AttentionCall]) -> torch.Tensor:
    reservoir = Reservoir(size, len(calls), torch.Generator().manual_seed(seed))
    for call in calls:
        reservoir.add(call, ())
        assert reservoir.vectors.shape[1] <= size
    return reservoir.vectors


def test_a_sample_is_uniform_over_keys_and_queries_of_a_stream_of_uneven_batches():
    padded = {0, 1, 9, 10, 15}
    calls = [numbered_call(0, 2, 3, padded), numbered_call(6, 1, 7, padded), numbered_call(13, 1, 4, padded)]
    real = [n for n in range(17) if n not in padded]
    size, draws = 5, 500
    counts = torch.zeros(2, 17)
    pairs = torch.zeros(24, 24)
    members = torch.zeros(SHARE)
    for seed in range(draws):
        vectors = sample(size, seed, calls)
        assert vectors.shape == (KV_HEADS, size, 3)
        kinds, tokens, heads = (vectors[0, :, n].long() for n in range(3))
        assert PADDING not in tokens
        # All heads sample the same tokens, and the same member of their group.
        assert torch.equal(vectors[0, :, :2], vectors[1, :, :2])
        assert torch.equal(vectors[1, :, 2], heads + torch.where(kinds == 1, SHARE, 1))
        counts.index_put_((kinds, tokens), torch.ones(()), accumulate=True)
        places = kinds * 12 + torch.tensor([real.index(n) for n in tokens.tolist()])
        pairs[places[:, None], places] += 1
        members += heads[kinds == 1].bincount(minlength=SHARE)
    counts = counts[:, real].flatten()
    share = size / len(counts)
    assert counts.sum() == draws * size
    # Without replacement the counts vary by a factor 1 - share less than a Poisson count would.
    chi_squared = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share))
    freedom = len(counts) - 1
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom)
    # Pairs are kept together as often as independence of a draw without replacement says.
    together = pairs[~torch.eye(24, dtype=torch.bool)]
    expected = draws * share * (size - 1) / (len(counts) - 1)
    assert ((together - expected).abs() < 5 * math.sqrt(expected)).all()
    assert ((members - members.sum() / SHARE).abs() < 4 * math.sqrt(members.sum() / SHARE)).all()


def test_a_sample_larger_than_the_stream_holds_every_key_and_one_query_per_token():
    calls = [numbered_call(0, 2, 3, {1}), numbered_call(6, 1, 4, {6}), numbered_call(10, 1, 3, {10, 11, 12})]
    for head, vectors in enumerate(sample(100, 0, calls)):
        kinds, tokens, heads = vectors.long().unbind(-1)
        real = [n for n in range(10) if n not in (1, 6)]
        assert sorted(tokens[kinds == 0].tolist()) == sorted(tokens[kinds == 1].tolist()) == real
        assert set(heads[kinds == 0].tolist()) == {head}
        assert set(heads[kinds == 1].tolist()) <= {head * SHARE + member for member in range(SHARE)}


def eager_attentions(model, batch) -> list[torch.Tensor]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return attentions


def recorded(model, batch) -> dict[str, AttentionCall]:
    calls = {}
    names = [name for name in dict(model.named_modules()) if name.endswith(("attn", "attention.self", "attention"))]
    with recording(model, names, lambda call: calls.update({call.name: call})), torch.no_grad():
        model(**batch)
    return calls


def test_spectra_are_those_of_all_queries_and_keys_if_the_sample_holds_them_all(tiny):
    model, tokens = tiny.llama(num_key_value_heads=4), tiny.tokens(3, 12)
    profile = dofla.linear.profile(model, tokens, samples=ALL, estimator="paper", batch_size=2)
    calls = recorded(model, {"input_ids": tokens})
    for layer in profile.layers:
        assert (layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim) == (4, 4, 8, 8)
        assert layer.scaling == pytest.approx(8**-0.5)
        assert layer.causal
        call = calls[layer.name]
        vectors = torch.cat([call.query, call.key], dim=2).transpose(0, 1).flatten(1, 2)
        for head, spectrum in enumerate(layer.spectra):
            expected = gram_spectrum(vectors[head], layer.scaling)
            assert spectrum.log_scale == pytest.approx(expected.log_scale, abs=1e-3)
            for lam in (2.0**-4, 2.0**-8):
                got = degrees_of_freedom(spectrum, lam)
                assert got == pytest.approx(degrees_of_freedom(expected, lam), rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_spectra_are_those_of_all_rows_of_attention_if_the_sample_holds_them_all(tiny, family):
    model, batch = getattr(tiny, family)(), tiny.padded(5, 20, "left" if family == "llama" else "right")
    profile = dofla.linear.profile(model, batch, samples=ALL, batch_size=2)
    real = batch["attention_mask"].bool()
    attentions = eager_attentions(model, batch)
    for layer, attention in zip(profile.layers, attentions, strict=True):
        share = layer.heads // layer.kv_heads
        for head, spectrum in enumerate(layer.spectra):
            assert spectrum.eigenvalues.shape == (5, real.sum(-1).max())
            # Windows come in the order of the text; which member of the group a row is of is drawn.
            for n, (values, mask) in enumerate(zip(spectrum.eigenvalues, real, strict=True)):
                rows = attention[n, share * head : share * (head + 1), mask].double()
                weight = rows.square().sum(-1)
                filled = len(values) / mask.sum().item()  # a row weighs the same in short windows
                trace = values.sum() / filled
                assert weight.amin(0).sum() * (1 - 1e-4) <= trace <= weight.amax(0).sum() * (1 + 1e-4)
                if share == 1:
                    expected = torch.linalg.svdvals(rows[0]).square() * filled
                    torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-4, atol=1e-5)
                    assert (values[len(expected) :] == 0).all()


def test_few_samples_are_spread_over_eight_windows_and_many_windows_give_64_rows_each(tiny):
    model, tokens = tiny.llama(), tiny.tokens(12, 70)
    shapes = {}
    for samples in (20, 256, 600, 10_000):
        profile = dofla.linear.profile(model, tokens, samples=samples)
        (shapes[samples],) = {tuple(s.eigenvalues.shape) for layer in profile.layers for s in layer.spectra}
    assert shapes == {20: (8, 2), 256: (8, 32), 600: (9, 64), 10_000: (12, 64)}


def test_standard_errors_stand_beside_the_degrees_and_one_window_has_none(tiny):
    model, tokens = tiny.llama(), tiny.tokens(6, 40)
    many, one = dofla.linear.profile(model, tokens, samples=384), dofla.linear.profile(model, tokens[:1], samples=40)
    for row, errors, layer in zip(many.dof(0.1), many.dof_errors(0.1), many.layers, strict=True):
        for value, error, spectrum in zip(row, errors, layer.spectra, strict=True):
            each = [degrees_of_freedom(Spectrum(values, 0.0), 0.1, "mean") for values in spectrum.eigenvalues]
            assert value == pytest.approx(sum(each) / 6)
            assert error == pytest.approx(torch.tensor(each, dtype=torch.float64).std().item() / 6**0.5)
    assert all(math.isnan(error) for row in one.dof_errors() for error in row)
    assert "±" in str(many)
    assert "±" not in str(one)
    assert "dof_error': None" in str(one.to_dict())


def test_the_papers_estimator_is_there_by_name_and_no_other(tiny):
    model, tokens = tiny.llama(), tiny.tokens(4, 40)
    paper = dofla.linear.profile(model, tokens, samples=32, estimator="paper")
    assert (paper.estimator, paper.normalization) == ("paper", "trace")
    assert {s.eigenvalues.shape for layer in paper.layers for s in layer.spectra} == {(32,)}
    assert {s.subsamples.shape for layer in paper.layers for s in layer.spectra} == {(8, 4)}
    usual = dofla.linear.profile(model, tokens, samples=32)
    assert (usual.estimator, usual.normalization) == ("attention", "mean")


def test_the_batch_size_plays_no_part(tiny):
    model, batch = tiny.gpt2(), tiny.padded(5, 20, "left")
    one, all_at_once = (dofla.linear.profile(model, batch, samples=ALL, batch_size=size) for size in (1, 5))
    torch.testing.assert_close(torch.tensor(one.dof()), torch.tensor(all_at_once.dof()), rtol=1e-4, atol=0)


def test_padding_plays_no_part(tiny):
    model, tokens = tiny.bert(), tiny.tokens(4, 12)
    mask = torch.zeros(4, 20, dtype=torch.int64)
    mask[:, :12] = 1
    padded = {"input_ids": torch.cat([tokens, tiny.tokens(4, 8, seed=1)], dim=1), "attention_mask": mask}
    plain, with_padding = (dofla.linear.profile(model, batch, samples=ALL) for batch in (tokens, padded))
    assert plain.tokens == with_padding.tokens == 48
    assert not any(layer.causal for layer in plain.layers)
    torch.testing.assert_close(torch.tensor(plain.dof()), torch.tensor(with_padding.dof()), rtol=1e-4, atol=0)
    with pytest.raises(DoflaError, match="padding alone"):
        dofla.linear.profile(tiny.bert(), padded | {"attention_mask": torch.zeros_like(mask)})


def test_images_are_profiled_like_text(tiny):
    profile = dofla.linear.profile(tiny.vit(), tiny.images(3), samples=ALL)
    assert profile.tokens == 3
    assert len(profile.layers) == 2
    for layer in profile.layers:
        assert not layer.causal
        assert len(layer.spectra) == 4
        assert layer.spectra[0].eigenvalues.shape == (3, 17)
    few = dofla.linear.profile(tiny.vit(), tiny.images(3), samples=20, estimator="paper")
    assert {len(s.eigenvalues) for layer in few.layers for s in layer.spectra} == {20}


def test_the_same_seed_gives_the_same_profile_whatever_the_dropout_and_another_another_sample(tiny):
    tokens, model = tiny.tokens(4, 40), tiny.gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    one, same, other = (dofla.linear.profile(model, tokens, samples=16, seed=seed).dof() for seed in (7, 7, 8))
    assert dofla.linear.profile(model.eval(), tokens, samples=16, seed=7).dof() == one
    assert one == same
    assert one != other


def test_half_precision_teachers_are_profiled(tiny):
    model, tokens = tiny.llama(num_key_value_heads=4), tiny.tokens(4, 16)
    full = dofla.linear.profile(model, tokens, samples=ALL)
    half = dofla.linear.profile(model.bfloat16(), tokens, samples=ALL)
    torch.testing.assert_close(torch.tensor(half.dof(0.1)), torch.tensor(full.dof(0.1)), rtol=0.2, atol=0)


def test_the_profile_says_what_was_measured_and_that_it_goes_on(tiny):
    first, second = (f"model.layers.{n}.self_attn" for n in range(2))
    options = {"samples": 16, "seed": 3, "normalization": "top", "batch_size": 2, "keep_softmax": [first]}
    seen = []
    found = dofla.linear.profile(tiny.llama(), tiny.tokens(5, 8), **options, progress=lambda *x: seen.append(x))
    assert (found.model, found.samples, found.tokens, found.seed) == ("LlamaForCausalLM", 16, 40, 3)
    assert found.normalization == "top"
    assert [layer.name for layer in found.layers] == [second]
    assert found.skipped == [SkippedLayer(first, 2, 8, 8, "asked for")]
    spectrum = found.layers[0].spectra[0]
    assert not spectrum.eigenvalues.requires_grad
    assert not spectrum.eigenvalues.is_inference()
    assert found.dof(0.1)[0][0] == degrees_of_freedom(spectrum, 0.1, "top")
    assert found.dof(0.1, "trace")[0][0] == degrees_of_freedom(spectrum, 0.1, "trace")
    assert seen == [("reading", n, 3) for n in (1, 2, 3)] + [("spectra", 1, 1)]


def test_the_model_is_left_as_it_was(tiny):
    model = tiny.llama()
    model.set_attn_implementation("eager")
    model.train()
    model.model.layers[1].eval()
    before = everything(model)
    dofla.linear.profile(model, tiny.tokens(2, 8), samples=8)
    assert everything(model) == before
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0}])
def test_the_model_can_be_trained_afterwards(tiny, rope):
    model = tiny.llama(rope_parameters=rope | {"rope_theta": 1e4}, max_position_embeddings=16)
    tokens = tiny.tokens(2, 24)
    dofla.linear.profile(model, tokens, samples=8)
    model(tokens, labels=tokens).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_nan_in_the_activations_names_layer_and_batch(tiny):
    model, tokens = tiny.llama(), tiny.tokens(6, 10).clamp(9, 62)
    tokens[4, 3] = 63
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.nan
    with pytest.raises(DoflaError, match=r"queries of layer model\.layers\.0\.self_attn hold NaN .* in batch 2"):
        dofla.linear.profile(model, tokens, samples=8, batch_size=2)
    assert model.config._attn_implementation == "sdpa"
    dofla.linear.profile(model, tokens[:4], samples=8)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    with pytest.raises(DoflaError, match=r"keys of layer model\.layers\.1\.self_attn hold NaN or infinity in batch 0"):
        dofla.linear.profile(model, tokens[:4], samples=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "unit"}, "unknown normalization 'unit': choose one of trace, top, mean, none"),
        ({"samples": 1}, "samples is 1: at least 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"estimator": "kernel"}, "'kernel'.*attention, paper"),
        ({"keep_softmax": ["layers.9"]}, r"keep_softmax names 'layers.9'.*model\.layers\.0\.self_attn"),
        ({"keep_softmax": ["model.layers.0.self_attn", "model.layers.1.self_attn"]}, "no layer is left"),
    ],
)
def test_a_bad_option_is_one_line_with_the_way_out(tiny, options, message):
    with pytest.raises(DoflaError, match=message):
        dofla.linear.profile(tiny.llama(), tiny.tokens(2, 8), **options)


def test_a_linearized_model_is_refused(tiny):
    with pytest.raises(DoflaError, match="converted already"):
        dofla.linear.profile(student_of(tiny), tiny.tokens(2, 8))


def some_profile() -> Profile:
    generator = torch.Generator().manual_seed(0)

    def layer(name, kv_heads, causal):
        spectra = [
            Spectrum(torch.rand(7, generator=generator, dtype=torch.float64), 1 / 3 + head, [None, "jitter"][head % 2])
            for head in range(kv_heads)
        ]
        return LayerProfile(name, 4, kv_heads, 8, 6, 8**-0.5, causal, spectra)

    layers = [layer("a.attention", 2, True), layer("b.attention", 4, False)]
    skipped = [SkippedLayer("c.attention", 2, 8, 6, "asked for")]
    return Profile("some/model", layers, 7, 1000, "a text", 3, "top", skipped)


def test_a_profile_round_trips_exactly(tmp_path):
    profile = some_profile()
    assert profile.save(tmp_path / "profile") == tmp_path / "profile"
    with pytest.raises(DoflaError, match="exists already"):
        profile.save(tmp_path / "profile")
    loaded = Profile.load(str(tmp_path / "profile"))
    assert loaded.dof() == profile.dof()
    data = json.loads((tmp_path / "profile" / "profile.json").read_text())
    shown = [[head["dof"] for head in layer["per_head"]] for layer in data["layers"]]
    assert shown == [[pytest.approx(n, abs=1e-4) for n in row] for row in profile.dof()]
    for left, right in zip(profile.layers, loaded.layers, strict=True):
        for ours, theirs in zip(left.spectra, right.spectra, strict=True):
            assert torch.equal(ours.eigenvalues, theirs.eigenvalues)
            assert (ours.log_scale, ours.retry) == (theirs.log_scale, theirs.retry)
        left.spectra = right.spectra = []
        assert left == right
    assert loaded == profile


def test_both_estimators_round_trip_with_their_errors(tiny, tmp_path):
    for estimator in ("attention", "paper"):
        profile = dofla.linear.profile(tiny.llama(), tiny.tokens(5, 16), samples=64, estimator=estimator)
        loaded = Profile.load(profile.save(tmp_path / estimator))
        assert loaded.estimator == estimator
        for lam, normalization in ((0.1, "top"), (0.01, "trace")):
            assert loaded.dof(lam, normalization) == profile.dof(lam, normalization)
            assert loaded.dof_errors(lam, normalization) == profile.dof_errors(lam, normalization)
        assert str(loaded) == str(profile)
        assert loaded.to_dict() == profile.to_dict()


def edit_json(change):
    def damage(folder):
        data = json.loads((folder / "profile.json").read_text())
        change(data)
        (folder / "profile.json").write_text(json.dumps(data))

    return damage


def edit_spectra(change):
    def damage(folder):
        tensors = load_file(folder / "spectra.safetensors")
        change(tensors)
        save_file(tensors, folder / "spectra.safetensors")

    return damage


DAMAGES = {
    "no profile.json": (lambda folder: (folder / "profile.json").unlink(), "profile.json"),
    "an earlier format": (edit_json(lambda data: data.update(format=2)), "format 2, this version of dofla reads 3"),
    "no layers": (edit_json(lambda data: data.pop("layers")), "profile.json"),
    "a layer of another kind": (edit_json(lambda data: data["layers"].append("x")), "profile.json"),
    "a field missing": (edit_json(lambda data: data["layers"][0].pop("scaling")), "profile.json"),
    "a head missing": (edit_json(lambda data: data["layers"][1]["per_head"].pop()), "profile.json"),
    "a head of another kind": (edit_json(lambda data: data["layers"][0].update(per_head=[1, 2])), "profile.json"),
    "a strange number": (edit_json(lambda data: data["layers"][0]["per_head"][0].update(odd=1)), "profile.json"),
    "a skipped layer of another kind": (edit_json(lambda data: data.update(skipped=[{"name": "x"}])), "profile.json"),
    "no spectra": (lambda folder: (folder / "spectra.safetensors").unlink(), "spectra.safetensors"),
    "the spectra of another layer": (edit_spectra(lambda x: x.update({"d": x.pop("a.attention")})), "a.attention"),
    "a spectrum too few": (edit_spectra(lambda x: x.update({"a.attention": x["a.attention"][:1]})), "a.attention"),
    "a number for a spectrum": (edit_spectra(lambda x: x.update({"a.attention": torch.ones(())})), "profile"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_profile_is_one_line_naming_the_file(tmp_path, kind):
    damage, named = DAMAGES[kind]
    folder = some_profile().save(tmp_path / "measured")
    damage(folder)
    with pytest.raises(DoflaError, match=f"(?s)(?=.*{folder}).*{named}"):
        Profile.load(folder)
