"""Models with a compressed cache: made at once, and used like any other model."""

from __future__ import annotations

import pytest
import torch
from arithmetic import LOGITS, sum_error
from sizes import compress
from tiny_families import teacher, tokens
from transformers import AutoModelForCausalLM, DynamicCache

import dofla
from dofla.attention import compiled
from dofla.errors import DoflaError
from dofla.integration.cache import cache_bytes
from dofla.integration.converted import Converted

needs_kernels = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))
FAMILIES = ["gpt2", "gpt_neox", "llama", "opt"]


@pytest.fixture(
    params=[
        pytest.param(family, marks=pytest.mark.slow) if family in ("gpt_neox", "opt") else family for family in FAMILIES
    ]
)
def model(request):
    # In float64: two ways to the same number may end on two sides of a step of a code, but hardly there.
    return teacher(request.param).double()


def compressed(model, slots=48):
    return compress(model, tokens(4, 48), slots, head_budgets="even")


@torch.no_grad()
def test_pieces_of_any_length_give_the_logits_of_one_forward_pass(model):
    student, ids = compressed(model), tokens(2, 120)
    whole = student(ids, use_cache=False).logits
    for cuts in ([120], [1] * 120, [7, 1, 50, 1, 1, 60]):
        cache = DynamicCache(config=student.config)
        pieces = [student(part, past_key_values=cache, use_cache=True).logits for part in ids.split(cuts, 1)]
        # Sums of float64, but for decoded tokens, which are float32 in either.
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e4 * torch.finfo(torch.float64).eps)
        assert cache_bytes(cache) > 2 * Converted.of(student).plan.state_bytes(torch.float64)


@torch.no_grad()
def test_left_padded_batches_write_as_single_sequences_do(model):
    student = compressed(model)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    alone = [tokens(1, length, seed=length) for length in (33, 70)]
    ids, mask = torch.zeros(2, 70, dtype=torch.int64), torch.zeros(2, 70, dtype=torch.int64)
    for row, sequence in enumerate(alone):
        ids[row, 70 - sequence.shape[1] :], mask[row, 70 - sequence.shape[1] :] = sequence[0], 1
    together = student.generate(ids, attention_mask=mask, **options)[:, 70:]
    for row, sequence in enumerate(alone):
        assert torch.equal(student.generate(sequence, **options)[0, sequence.shape[1] :], together[row])


@torch.no_grad()
def test_beams(model):
    student, ids = compressed(model), tokens(2, 60)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    assert torch.equal(student.generate(ids, **options), student.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_it_is_saved_and_opened_with_what_was_measured(model, tmp_path):
    student, ids = compressed(model), tokens(2, 90)
    wanted = student(ids).logits
    student.save_pretrained(tmp_path / "student")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float64)
    assert torch.equal(opened(ids).logits, wanted)
    dofla.restore(student).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    dofla.save_adapter(compressed(base), tmp_path / "adapter")
    assert torch.equal(dofla.load(tmp_path / "adapter", dtype=torch.float64)(ids).logits, wanted)


def _not_a_number(coder):
    coder.back.fill_(torch.nan)


def _other_bits(coder):
    coder.bits[0] = 200


def _bits_moved(coder):
    coder.bits[0] += 1


@pytest.mark.parametrize(
    ("damage", "match"),
    [(_not_a_number, "back holds NaN"), (_other_bits, r"bits of blocks are \[200"), (_bits_moved, "in the mean")],
)
def test_constants_that_no_coder_has_are_refused(tmp_path, damage, match):
    teacher("llama").save_pretrained(tmp_path / "base")
    student = compressed(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    damage(next(iter(Converted.of(student).layers.values())).compressed.tiers[0].value)
    student.save_pretrained(tmp_path / "student")
    dofla.save_adapter(student, tmp_path / "adapter")
    for name in ("student", "adapter"):
        with pytest.raises(DoflaError, match=match):
            dofla.load(tmp_path / name)
    with pytest.raises(DoflaError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path / "student")


@torch.no_grad()
def test_a_saved_prompt_goes_on(model, tmp_path):
    student, document = compressed(model), tokens(1, 100)
    dofla.serving.save_state(
        dofla.serving.read_prompt(student, document, chunk=17), document, tmp_path / "state", student
    )
    prompt, cache = dofla.serving.load_state(tmp_path / "state", student)
    whole = torch.cat([prompt, tokens(1, 5, seed=3)], 1)
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(whole), "pad_token_id": 0}
    assert torch.equal(student.generate(whole, past_key_values=cache, **options), student.generate(whole, **options))


@torch.no_grad()
def test_what_the_cache_holds_is_hardly_changed(model):
    ids = tokens(2, 24)
    wanted = torch.log_softmax(model(ids).logits, -1)
    found = torch.log_softmax(compressed(model, slots=200)(ids).logits, -1)
    evicts = torch.log_softmax(compressed(dofla.restore(model), slots=16)(ids).logits, -1)

    def divergence(x):
        return (wanted.exp() * (wanted - x)).sum(-1).mean()

    assert divergence(found) < 0.2 * divergence(evicts)


def test_the_original_comes_back(model):
    ids = tokens(1, 20)
    wanted = model(ids).logits
    assert torch.equal(dofla.restore(compressed(model))(ids).logits, wanted)


def test_refusals(tiny):
    with pytest.raises(DoflaError, match="is bidirectional: an encoder keeps no tokens, linearize it instead"):
        dofla.compress(tiny.bert(), tiny.tokens(2, 16))
    with pytest.raises(DoflaError, match=r"size 160 bytes is too small .*: give \d+ bytes or more"):
        dofla.compress(tiny.llama(), tiny.tokens(2, 16), 160)
    with pytest.raises(DoflaError, match="nothing to calibrate on: give windows of text, or a calibration"):
        dofla.compress(tiny.llama(), size="1KiB")
    with pytest.raises(DoflaError, match="prefill is 'stream': choose one of auto, exact, sequential"):
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
