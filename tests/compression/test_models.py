"""Models with a compressed cache: what they keep, and what is refused; they are used like any other model in
tests/integration."""

import pytest
import torch
from arithmetic import LOGITS, sum_error
from sizes import FAMILIES, compress, needs_kernels
from tiny_families import teacher, tokens
from transformers import AutoModelForCausalLM, DynamicCache

import dofla
from dofla.attention import compiled
from dofla.errors import DoflaError
from dofla.integration.converted import Converted


def compressed(model, slots=48):
    return compress(model, tokens(4, 48), slots, head_budgets="even", prefill="sequential")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda layer: layer.compressed.tiers[0].value.back.fill_(torch.nan), "back holds NaN"),
        (lambda layer: layer.compressed.tiers[0].value.bits[:1].fill_(200), r"bits of blocks are \[200"),
        (lambda layer: layer.compressed.tiers[0].value.bits[:1].add_(1), "in the mean"),
        (lambda layer: layer.smoothing.scale[0].fill_(torch.inf), "smoothing.*scale holds NaN"),
        (lambda layer: layer.predictor.weight[0, 3].fill_(torch.nan), "predictor.*weight holds NaN"),
    ],
)
def test_constants_that_no_layer_has_are_refused(tmp_path, damage, match):
    teacher("llama").save_pretrained(tmp_path / "base")
    student = compressed(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    damage(next(iter(Converted.of(student).layers.values())))
    student.save_pretrained(tmp_path / "student")
    dofla.save_adapter(student, tmp_path / "adapter")
    for name in ("student", "adapter"):
        with pytest.raises(DoflaError, match=match):
            dofla.load(tmp_path / name)
    with pytest.raises(DoflaError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path / "student")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_cache_holds_is_hardly_changed(family):
    model, ids = teacher(family).double(), tokens(2, 24)
    wanted = torch.log_softmax(model(ids).logits, -1)
    found = torch.log_softmax(compressed(model, slots=200)(ids).logits, -1)
    evicts = torch.log_softmax(compressed(dofla.restore(model), slots=16)(ids).logits, -1)

    def divergence(x):
        return (wanted.exp() * (wanted - x)).sum(-1).mean()

    assert divergence(found) < 0.2 * divergence(evicts)


def test_refusals(tiny):
    with pytest.raises(DoflaError, match="is bidirectional: an encoder keeps no tokens, linearize it instead"):
        dofla.compress(tiny.bert(), tiny.tokens(2, 16))
    with pytest.raises(DoflaError, match=r"size 160 bytes is too small .*: give \d+ bytes or more"):
        dofla.compress(tiny.llama(), tiny.tokens(2, 16), 160)
    with pytest.raises(
        DoflaError, match="no tokenizer to calibrate with: give the tokenizer, windows of text, or a cal"
    ):
        dofla.compress(tiny.llama(), size="1KiB")
    with pytest.raises(DoflaError, match="prefill is 'stream': choose one of exact, sequential"):
        dofla.compress(tiny.llama(), tiny.tokens(2, 16), prefill="stream")
    with pytest.raises(DoflaError, match="is bidirectional: an encoder keeps no tokens"):
        dofla.compress(tiny.vit(), tiny.images(2), "3KB")
    odd = tiny.llama(head_dim=12)
    with pytest.raises(DoflaError, match="heads of 12 and 12 numbers: a compressed cache needs multiples of 8"):
        dofla.compress(odd, tiny.tokens(2, 16))
    broken = tiny.llama()
    with torch.no_grad():
        broken.model.layers[1].self_attn.k_proj.weight.fill_(torch.nan)
    with pytest.raises(DoflaError, match=r"the keys of layer model\.layers\.1\.self_attn hold NaN"):
        dofla.compress(broken, tiny.tokens(2, 16))
    assert not hasattr(broken, "_dofla_softmax_implementation")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_kernels_do_what_plain_torch_does(tiny, dtype, monkeypatch):
    # One layer, so that no rounding reaches what is coded.
    student = compress(tiny.llama(num_hidden_layers=1).to(dtype), tiny.tokens(4, 48), tokens=48, head_budgets="even")
    batch = tiny.padded(3, 120, side="left")

    def read():
        cache, found, seen = DynamicCache(config=student.config), [], 0
        for length in (7, 1, 50, 1, 1, 60):
            part = batch["input_ids"][:, seen : seen + length]
            seen += length
            mask = batch["attention_mask"][:, :seen]
            found.append(student(part, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
            cache.reorder_cache(torch.tensor([0, 1, 2]))
        return torch.cat(found, 1), cache.layers[0].states[0]

    logits, state = read()
    monkeypatch.setattr(compiled, "usable", lambda *_: False)
    wanted, plain = read()
    assert torch.equal(state.rows, plain.rows)
    # An average rounded to the other side in a step of the dtype goes through the rest of the layer.
    bound = LOGITS if dtype == torch.float32 else {"rtol": 0, "atol": sum_error(8, wanted.abs().max().item(), dtype)}
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(logits[real], wanted[real], **bound)
