"""End-to-end distillation: what it learns, what stays the teacher, what it leaves behind, and that it can go on."""

import copy
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from arithmetic import LOGITS
from safetensors.torch import load_file, save_file
from stopping import Stop, base_weights, equal, feature_maps, stop_after
from students import keep_softmax, student_of
from tiny_families import teacher
from torch.testing import assert_close

import dofla
from dofla.data import TokenWindows, as_windows
from dofla.distillation import distill_end_to_end, objective
from dofla.distillation.checkpoint import CURVES, STATE
from dofla.distillation.objective import Objective
from dofla.distillation.trainable import trainable
from dofla.errors import DoflaError
from dofla.evaluation.embeddings import embedding_figures
from dofla.evaluation.language import next_token_figures
from dofla.integration.converted import Converted

WINDOWS, LENGTH = 8, 16
OPTIONS = {"steps": 4, "batch_size": 2, "accumulate": 2}
RATES = {"lora": {"weights": 1e-3}, "maps": None}
UP = "model.layers.0.mlp.up_proj.lora_A"
every_choice = pytest.mark.parametrize("weights", ["lora", "maps"])


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens)[0]


def teacher_logits(student, tokens):
    with dofla.original(student):
        return logits(student, tokens)


def divergence(student, tokens):
    return next_token_figures(student, TokenWindows.of(tokens), batch_size=WINDOWS)["kl"]


@pytest.mark.parametrize(
    ("weights", "family"), [("lora", "llama"), ("maps", "gpt2"), ("maps", "llama"), ("lora", "gpt_neox")]
)
def test_the_student_comes_closer_to_its_teacher(tiny, weights, family):
    student, tokens = student_of(tiny, teacher(family)), tiny.tokens(WINDOWS, LENGTH)
    before, options = divergence(student, tokens), {"weights": weights, "learning_rates": RATES[weights]}
    history = distill_end_to_end(student, tokens, steps=15, batch_size=WINDOWS, **options)
    assert history.layers == ["kl"]
    assert history.losses.shape == (15, 1)
    assert history.losses[0].item() == pytest.approx(before, rel=1e-4)
    assert divergence(student, tokens) < {"maps": 0.98, "lora": 0.85}[weights] * before
    assert history.seconds > 0


@every_choice
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_embeddings_come_closer(tiny, weights, family):
    student = student_of(tiny, family)
    windows = as_windows(tiny.images(WINDOWS) if family == "vit" else tiny.padded(WINDOWS, LENGTH))
    before = embedding_figures(student, windows)["cosine"]
    options = {"steps": 15, "weights": weights, "learning_rates": RATES[weights]}
    history = distill_end_to_end(student, windows, batch_size=WINDOWS, **options)
    assert history.layers == ["embedding"]
    assert history.losses[-1] < {"maps": 0.98}.get(weights, 0.85) * history.losses[0]
    assert embedding_figures(student, windows)["cosine"] > before


def test_padding_counts_for_nothing_and_a_split_step_is_the_same_step(tiny):
    tokens = tiny.padded(WINDOWS, LENGTH)
    expected = next_token_figures(student_of(tiny), TokenWindows(**tokens))["kl"]
    whole, split = (
        distill_end_to_end(student_of(tiny), tokens, steps=2, batch_size=size, accumulate=WINDOWS // size).losses
        for size in (WINDOWS, 2)
    )
    assert whole[0].item() == pytest.approx(expected, rel=1e-4)
    assert_close(whole, split, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "bert_decoder"])
def test_the_loss_in_slices_has_the_gradient_of_the_loss(tiny, family, monkeypatch):
    # A BERT decoder has more in its head than the output layer, so all of its logits are made at once.
    monkeypatch.setattr(objective, "POSITIONS_AT_A_TIME", 7)
    student = student_of(tiny, teacher(family))
    tokens = tiny.tokens(2, LENGTH)
    with trainable(Converted.of(student), "lora", 1) as part:
        loss = Objective(student, part.teacher)
        assert loss.head_apart == (family == "llama")
        ours = loss({"input_ids": tokens}, 2 * (LENGTH - 1), 2)
        ours.backward()
        found = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
        student.zero_grad()
        theirs = teacher_logits(student, tokens)[:, :-1].log_softmax(-1)
        expected = (theirs.exp() * (theirs - student(tokens).logits[:, :-1].log_softmax(-1))).sum(-1).mean()
        expected.backward()
        assert_close(ours, expected)
        assert_close(found, {name: p.grad for name, p in student.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("weights", "dtype"), [("lora", torch.float32), ("lora", torch.bfloat16), ("maps", torch.bfloat16)]
)
def test_teacher_and_original_stay_bit_for_bit(tiny, weights, dtype):
    student, tokens = student_of(tiny, tiny.llama(tie_word_embeddings=True).to(dtype)), tiny.tokens(WINDOWS, LENGTH)
    before, weights_before, names = teacher_logits(student, tokens), base_weights(student), set(student.state_dict())
    maps, answers = feature_maps(student), logits(student, tokens)
    distill_end_to_end(student, tokens, **OPTIONS, weights=weights)
    assert set(student.state_dict()) == names
    assert {p.dtype for name, p in student.named_parameters() if ".dofla." not in name} == {dtype}
    assert all(p.requires_grad and p.grad is None for p in student.parameters())
    assert not any(torch.equal(value, maps[name]) for name, value in feature_maps(student).items())
    assert not torch.equal(logits(student, tokens), answers)
    assert equal(base_weights(student), weights_before) == (weights == "maps")
    answers = logits(student, tokens)
    with dofla.original(student), ThreadPoolExecutor(1) as pool:  # a block within a block is the teacher still
        assert torch.equal(teacher_logits(student, tokens), before)
        assert torch.equal(pool.submit(logits, student, tokens).result(), answers)  # in its own thread alone
        assert equal(base_weights(student), weights_before)
    with torch.inference_mode(), dofla.original(student):
        student(tokens)
    student(tokens).logits.sum().backward()
    copied = copy.deepcopy(student)
    for model in (student, copied):
        assert torch.equal(teacher_logits(model, tokens), before)
        dofla.restore(model)
        assert equal(model.state_dict(), weights_before)
        assert torch.equal(logits(model, tokens), before)
        assert not [name for name, _ in model.named_buffers() if "dofla" in name]


def test_merged_factors_answer_as_factors_beside_the_weights(tiny):
    for model in (tiny.llama(), tiny.gpt2()):
        student, tokens = student_of(tiny, model), tiny.tokens(2, LENGTH)
        with trainable(Converted.of(student), "lora", 4) as part:
            assert not any("lm_head" in name for name in part.weights)
            with torch.no_grad():
                for weight in part.weights.values():
                    weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
            apart = logits(student, tokens)
        assert_close(logits(student, tokens), apart, **LOGITS)
        assert (apart - logits(student_of(tiny, type(model)(model.config).eval()), tokens)).abs().max() > 0.01


@every_choice
def test_an_adapter_holds_what_was_learned(tiny, tmp_path, weights):
    model, tokens = tiny.llama(), tiny.tokens(WINDOWS, LENGTH)
    model.save_pretrained(tmp_path / "base")
    model.config._name_or_path = str(tmp_path / "base")
    student = student_of(tiny, model)
    distill_end_to_end(student, tokens, steps=1, batch_size=2, weights=weights)
    dofla.save_adapter(student, tmp_path / "adapter")
    opened = dofla.load(tmp_path / "adapter")
    assert torch.equal(logits(opened, tokens), logits(student, tokens))
    assert torch.equal(teacher_logits(opened, tokens), teacher_logits(student, tokens))
    student.save_pretrained(tmp_path / "whole")
    assert torch.equal(logits(dofla.load(tmp_path / "whole"), tokens), logits(student, tokens))


def test_the_folder_lora_fits_a_student_made_anew(tiny, tmp_path):
    student, tokens = student_of(tiny, tiny.gpt2()), tiny.tokens(WINDOWS, LENGTH)
    distill_end_to_end(student, tokens, **OPTIONS, lora_rank=3, folder=tmp_path)
    fresh = student_of(tiny, tiny.gpt2())
    for name, layer in Converted.of(fresh).layers.items():
        layer.load_state_dict(Converted.of(student).layers[name].state_dict())
    assert dofla.linear.merge_lora(fresh, tmp_path / "lora") is fresh
    assert equal(fresh.state_dict(), student.state_dict())
    assert (tmp_path / "lora" / "lora.safetensors").stat().st_size < (tmp_path / STATE).stat().st_size / 2
    with pytest.raises(DoflaError, match=r"trained end to end already: dofla\.restore"):
        dofla.linear.merge_lora(fresh, tmp_path / "lora")
    with pytest.raises(DoflaError, match="not converted"):
        dofla.linear.merge_lora(tiny.gpt2(), tmp_path / "lora")


@pytest.fixture(scope="module")
def factors(tiny, tmp_path_factory):
    """The file of low-rank factors of a training."""
    folder = tmp_path_factory.mktemp("factors")
    distill_end_to_end(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), steps=1, folder=folder)
    return folder / "lora" / "lora.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "does not exist"),
        (lambda tensors: tensors.clear(), "holds no low-rank factors"),
        (lambda tensors: tensors.pop(UP), "not one of a pair"),
        (lambda tensors: tensors.update(weight=torch.ones(2)), "'weight' is not one of a pair"),
        (lambda tensors: tensors.update({"x.lora_A": torch.ones(2, 2), "x.lora_B": torch.ones(2, 2)}), "layer 'x'"),
        (lambda tensors: tensors.update({UP: torch.ones(16, 5)}), r"is \[48, 32\].* \[48, 16\] times \[16, 5\]"),
        (lambda tensors: tensors[UP].fill_(math.nan), "NaN or infinity"),
    ],
)
def test_factors_that_do_not_fit_are_one_line_and_change_nothing(tiny, factors, tmp_path, change, message):
    path, student, tensors = tmp_path / "lora.safetensors", student_of(tiny), load_file(factors)
    before = base_weights(student)
    if change:
        change(tensors)
        save_file(tensors, path)
    with pytest.raises(DoflaError, match=f"{path}.*{message}"):
        dofla.linear.merge_lora(student, tmp_path)
    assert equal(base_weights(student), before)


def test_layers_made_again_change_no_number(tiny):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    runs = []
    for again in (False, True):
        student = student_of(tiny, tiny.gpt2(resid_pdrop=0.5))
        losses = distill_end_to_end(student, tokens, **OPTIONS, gradient_checkpointing=again).losses
        assert not any(module.training for module in student.modules())
        assert not any(getattr(module, "gradient_checkpointing", False) for module in student.modules())
        runs.append((losses, student.state_dict()))
    assert torch.equal(runs[0][0], runs[1][0])
    assert equal(runs[0][1], runs[1][1])


def test_bfloat16_products_train_float32_weights(tiny):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    exact, rough = (
        distill_end_to_end(student_of(tiny), tokens, steps=2, batch_size=4, precision=precision).losses
        for precision in (None, "bf16")
    )
    assert_close(rough, exact, rtol=0.05, atol=0)
    assert not torch.equal(rough, exact)


def test_modes_generator_and_gradients_are_left_as_they_were(tiny):
    student, tokens = student_of(tiny).train(), tiny.tokens(WINDOWS, LENGTH)
    state = torch.get_rng_state()
    with torch.no_grad():
        first = distill_end_to_end(student, tokens, **OPTIONS).losses
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in student.modules())
    torch.rand(3)
    assert torch.equal(distill_end_to_end(student_of(tiny), tokens, **OPTIONS).losses, first)
    assert not torch.equal(distill_end_to_end(student_of(tiny), tokens, **OPTIONS, seed=1).losses, first)


def test_accelerate_reads_the_data_parallel_config():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(Path(__file__).parents[2] / "examples" / "data_parallel.yaml"))
    assert (config.distributed_type, config.num_processes) == ("MULTI_GPU", 2)


@every_choice
@pytest.mark.parametrize("stop", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_as_if_it_had_not_been(tiny, tmp_path, weights, stop):
    tokens, options = tiny.tokens(WINDOWS, LENGTH), OPTIONS | {"weights": weights}
    whole = student_of(tiny, window=3)
    expected = distill_end_to_end(whole, tokens, **options)
    options |= {"folder": tmp_path, "checkpoint_every": 1}
    student = student_of(tiny, window=3)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(Stop):
        distill_end_to_end(student, tokens, progress=stop_after(stop), **options)
    assert equal(student.state_dict(), before)
    steps = []
    history = distill_end_to_end(student, tokens, progress=lambda done, *_: steps.append(done), **options)
    assert steps == list(range(stop + 1, 5))
    again = student_of(tiny, window=3)
    opened = distill_end_to_end(again, tokens, progress=lambda done, *_: steps.append(done), **options)
    assert steps == list(range(stop + 1, 5))
    for model, found in ((student, history), (again, opened)):
        assert torch.equal(found.losses, expected.losses)
        assert equal(model.state_dict(), whole.state_dict())
    assert json.loads((tmp_path / CURVES).read_text())["loss"] == "kl"
    assert (tmp_path / "lora").exists() == (weights == "lora")
    with pytest.raises(DoflaError, match="belongs to a run with another seed"):
        distill_end_to_end(student_of(tiny, window=3), tokens, **options, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: 0}, f"{name} is 0: give 1 or more") for name in ("steps", "batch_size", "accumulate", "lora_rank")),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"weights": "some"}, "unknown weights 'some': choose one of lora, maps"),
        ({"precision": "fp8"}, "unknown precision 'fp8': choose bf16, or None"),
        ({"batch_size": 3, "accumulate": 3}, "8 windows are too few for one step of 9"),
        ({"learning_rates": {"z": 1.0}}, "learning_rates names 'z': weights='lora' trains maps and weights"),
        ({"learning_rates": {"maps": math.nan}}, "the learning rate of 'maps' is nan"),
        ({"weights": "maps", "learning_rates": {"weights": 1.0}}, "learning_rates names 'weights'"),
    ],
)
def test_a_bad_option_is_one_line_with_the_way_out(tiny, options, message):
    with pytest.raises(DoflaError, match=message):
        distill_end_to_end(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), **options)


def test_students_it_cannot_train_are_refused(tiny, monkeypatch):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    with pytest.raises(DoflaError, match="not converted"):
        distill_end_to_end(tiny.llama(), tokens)
    with pytest.raises(DoflaError, match="nothing to train"):
        distill_end_to_end(dofla.linear.linearize(model := tiny.llama(), keep_softmax(tiny.plan(model), 0, 1)), tokens)
    with pytest.raises(DoflaError, match="windows of one token"):
        distill_end_to_end(student_of(tiny), tokens[:, :1])
    student = student_of(tiny)
    distill_end_to_end(student, tokens, steps=1)
    with pytest.raises(DoflaError, match="trained end to end already"):
        distill_end_to_end(student, tokens, steps=1)
    sharded = {"distributed_type": accelerate.DistributedType.FSDP, "num_processes": 2, "process_index": 0}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: SimpleNamespace(**sharded))
    with pytest.raises(DoflaError, match=r"set up for FSDP.*data_parallel\.yaml"):
        distill_end_to_end(student_of(tiny), tokens)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DoflaError, match=r"needs peft: pip install 'dofla\[finetune\]'"):
        distill_end_to_end(student_of(tiny), tokens)


def test_a_loss_that_is_not_finite_names_the_step_and_leaves_the_student_alone(tiny):
    student, tokens = student_of(tiny), tiny.tokens(WINDOWS, LENGTH)
    before = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    with pytest.raises(DoflaError, match=r"the kl loss is (nan|inf) at step \d: lower learning_rates"):
        distill_end_to_end(student, tokens, learning_rates={"weights": 1e30})
    assert equal(student.state_dict(), before)
