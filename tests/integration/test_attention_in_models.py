"""Inside a model the layers compute what they should: the oracle's attention, on the teacher's queries and keys."""

import pytest
import torch
from arithmetic import LOGITS, sum_error
from tiny_families import CAUSAL, inputs, own_student, student, teacher, tokens
from torch.testing import assert_close

from dofla.attention import naive_attention, rounded
from dofla.integration.converted import Converted
from dofla.integration.interface import dofla_attention
from dofla.integration.recorder import recording
from dofla.integration.sites import attention_sites

ENCODERS = ["bert", "roberta", "vit"]


@torch.no_grad()
def output(model):
    out = model(**inputs(model))
    real = inputs(model).get("attention_mask")
    out = out.logits if "logits" in out else out.last_hidden_state
    return out if real is None or model.config.is_encoder_decoder else out[real.bool()]


def calls(model):
    """What each linear layer is called with and gives back in one forward pass."""
    seen = {}
    for name, layer in Converted.of(model).layers.items():
        layer.register_forward_hook(
            lambda layer, args, kwargs, out, name=name: seen.update({name: (*args, kwargs, out[0])}), with_kwargs=True
        )
    output(model)
    return seen


def oracle(layer, query, key, value, scaling, weight, causal=True, **_):
    """Head by head, in float64."""
    if layer.groups[0].int8:
        key, value = rounded(key), rounded(value)
    share = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        group = next(group for group in layer.groups if head // share in group.heads)
        place = group.heads.index(head // share)
        q, k, v = (t[:, [n]].double() for t, n in ((query, head), (key, head // share), (value, head // share)))
        a, b = (
            log_features(x.expand(-1, len(group.heads), -1, -1), scaling)[:, [place]]
            for log_features, x in ((group.map.log_query, q), (group.map.log_key, k))
        )
        options = {"query": q, "key": k, "scaling": scaling, "weight": weight, "causal": causal}
        outputs.append(naive_attention(a, b, v, window=group.window, sinks=group.sinks, **options))
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("kind", ["ragged", "eight_bits"])
@pytest.mark.parametrize("family", [*CAUSAL, *ENCODERS, "bart"])
def test_each_layer_gives_what_the_oracle_gives(family, kind):
    model = own_student(family, kind)
    sites = attention_sites(teacher(family))
    seen = calls(model)
    assert seen
    for name, (query, key, value, kwargs, out) in seen.items():
        site = sites[name]
        assert (kwargs["scaling"], kwargs.get("causal", True)) == (site.scaling, site.causal)
        assert (kwargs["weight"] is None) == (family == "vit" or ("decoder" in name and family == "bart"))
        assert len({(group.window, group.sinks) for group in Converted.of(model).layers[name].groups}) > 1
        expected = oracle(Converted.of(model).layers[name], query, key, value, **kwargs)
        if site.causal and kwargs["weight"] is not None:  # padded queries get nothing
            expected = expected * kwargs["weight"][:, None, :, None]
        bound = sum_error(200)  # scores of up to about 50 are rounded twice; an average of some 20 values
        assert_close(out.float(), expected.float(), rtol=bound, atol=bound)


def test_a_family_that_scales_its_queries_itself_is_seen_with_the_scaling_shared_by_queries_and_keys():
    model, projected, recorded = teacher("opt"), {}, {}
    for name in attention_sites(model):
        module = model.get_submodule(name).q_proj
        module.register_forward_hook(lambda module, args, out, name=name: projected.update({name: out}))
    with recording(model, attention_sites(model), lambda call: recorded.update({call.name: call})):
        output(model)
    for name, call in recorded.items():
        assert call.scaling == pytest.approx(8**-0.5)
        assert_close(call.query.transpose(1, 2).flatten(2), projected[name])


def test_a_family_that_passes_no_scaling_gets_the_customary_one():
    module = student("llama", "ragged").model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, 2, 2))
    expected, _ = dofla_attention(module, query, key, value, None, scaling=8**-0.5)
    assert_close(dofla_attention(module, query, key, value, None)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["exact_window", pytest.param("exact_sinks", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [*CAUSAL, *ENCODERS, "bart"])
def test_exact_scores_for_the_whole_text_make_the_student_its_teacher(family, kind):
    model, original = student(family, kind), teacher(family)
    assert_close(output(model), output(original), **LOGITS)
    if model.can_generate():
        ids, options = tokens(2, 9), {"max_new_tokens": 4, "do_sample": False}
        assert_close(model.generate(ids, **options), original.generate(ids, **options))


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_decoder_with_softmax_cross_attention_generates_with_cache_as_without(beams):
    model = student("bart", "ragged")
    assert sorted(name.rsplit(".", 1)[1] for name in Converted.of(model).layers) == ["self_attn"] * 4
    batch = inputs(model)
    options = {"attention_mask": batch["attention_mask"], "num_beams": beams, "do_sample": False, "max_new_tokens": 9}
    with_cache = model.generate(batch["input_ids"], **options)
    assert_close(with_cache, model.generate(batch["input_ids"], **options, use_cache=False))
    alone = model.generate(batch["input_ids"][:1, :13], **options | {"attention_mask": None})
    assert_close(with_cache[:1], alone)


@pytest.mark.parametrize("family", ["gpt2_crossing", "bert_crossing"])
def test_a_decoder_beside_softmax_cross_attention_gives_with_cache_what_it_gives_without(family):
    model, ids = student(family, "ragged"), tokens(2, 9)
    context = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert not any("crossattention" in name for name in Converted.of(model).layers)
    with torch.no_grad():
        whole = model(ids, encoder_hidden_states=context, use_cache=False).logits
        first = model(ids[:, :6], encoder_hidden_states=context, use_cache=True)
        cache = first.past_key_values
        rest = model(ids[:, 6:], encoder_hidden_states=context, past_key_values=cache, use_cache=True).logits
    assert_close(torch.cat([first.logits, rest], 1), whole, **LOGITS)
