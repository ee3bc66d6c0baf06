"""One function fine-tunes softmax models and students, all weights or low-rank ones."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from arithmetic import LOGITS
from torch.testing import assert_close

from dofla.errors import DoflaError
from dofla.integration.checkpoint import load, save_adapter
from dofla.integration.student import is_linearized
from dofla.tasks import STYLES
from dofla.tasks.finetune import finetune, loop
from dofla.tasks.scores import TaskScores
from dofla.tasks.scoring import score

pytestmark = pytest.mark.slow

KINDS = ["llama", "llama student", "gpt2", "gpt2 student"]
OPTIONS = {"learning_rate": 1e-2, "batch_size": 4, "epochs": 6}


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, before):
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def tune(toy, kind, **options):
    model = toy.model(kind)
    return model, finetune(model, toy.tokenizer, toy.task, toy.task, **(OPTIONS | options))


ALL = {"learning_rate": 5e-3, "epochs": 12}
LOW_RANK = {"lora_rank": 8, "learning_rate": 2e-2, "epochs": 24}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [ALL, LOW_RANK], ids=["all", "low-rank"])
def test_any_model_learns_the_task_by_the_same_call(toy, kind, options):
    # With the embeddings of random models frozen, low-rank updates can learn a few items by heart, not many.
    task = replace(toy.task, items=toy.task.items[:8]) if options is LOW_RANK else toy.task
    model = toy.model(kind)
    assert score(model, toy.tokenizer, task).accuracy() < 0.9
    result = finetune(model, toy.tokenizer, task, task, **(OPTIONS | options))
    assert result.accuracy == 1.0
    assert result.epochs[-1].loss < 0.6 * result.epochs[0].loss
    assert result.steps == (48 if options is LOW_RANK else 72)
    assert score(model, toy.tokenizer, task).accuracy() == 1.0
    assert is_linearized(model) == ("student" in kind)
    assert not model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("train_feature_maps", [False, True])
@pytest.mark.parametrize("lora_rank", [None, 2])
def test_feature_maps_are_frozen_unless_asked_for(toy, train_feature_maps, lora_rank):
    model = toy.model("llama student")
    before = weights(model)
    options = OPTIONS | {"epochs": 1, "lora_rank": lora_rank, "train_feature_maps": train_feature_maps}
    result = finetune(model, toy.tokenizer, toy.task, toy.task, **options)
    maps = {name for name in before if ".dofla." in name}
    assert maps
    assert maps & changed(model, before) == (maps if train_feature_maps else set())
    if lora_rank is None:
        assert changed(model, before) >= before.keys() - maps
        trained = before if train_feature_maps else before.keys() - maps
        assert result.trained == sum(before[name].numel() for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_low_rank_training_touches_linear_layers_only_by_few_numbers(toy, kind):
    model = toy.model(kind)
    before = weights(model)
    result = finetune(model, toy.tokenizer, toy.task, toy.task, **(OPTIONS | {"epochs": 1}), lora_rank=1)
    assert result.trained < sum(p.numel() for p in before.values()) / 10
    assert weights(model).keys() == before.keys()
    moved = changed(model, before)
    assert moved
    for name in moved:
        assert "lm_head" not in name
        assert torch.linalg.matrix_rank(model.get_parameter(name).detach() - before[name], atol=1e-5, rtol=0) == 1


@pytest.mark.parametrize("kind", ["llama student", "gpt2 student"])
@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_fine_tuned_student_saves_and_opens(toy, kind, lora_rank, tiny, tmp_path):
    model, _ = tune(toy, kind, epochs=1, lora_rank=lora_rank)
    model.save_pretrained(tmp_path / "model")
    opened = load(tmp_path / "model")
    ids = tiny.tokens(2, 20)
    with torch.inference_mode():
        assert_close(opened(ids).logits, model(ids).logits, rtol=0, atol=0)
    save_adapter(opened, tmp_path / "adapter")
    assert_close(load(tmp_path / "adapter").state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize("kind", ["llama", "llama student"])
def test_a_bfloat16_model_learns_and_ends_in_float32(toy, kind, lora_rank):
    model = toy.model(kind).bfloat16()
    options = OPTIONS | {"epochs": 2, "lora_rank": lora_rank, "mixed_precision": "bf16"}
    result = finetune(model, toy.tokenizer, toy.task, toy.task, **options)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert result.epochs[1].loss < result.epochs[0].loss


def test_updates_below_the_resolution_of_bfloat16_outlive_the_merge(toy):
    model = toy.model("llama").bfloat16()
    before = weights(model)
    finetune(model, toy.tokenizer, toy.task, toy.task, **(OPTIONS | {"learning_rate": 1e-5}), lora_rank=2)
    after = model.model.layers[0].mlp.up_proj.weight
    assert (after != before["model.layers.0.mlp.up_proj.weight"].float()).float().mean() > 0.9


@pytest.mark.parametrize("lora_rank", [None, 2])
@pytest.mark.parametrize(("keep", "kept"), [("best", 2), ("last", 4)])
def test_the_model_holds_the_weights_of_the_kept_epoch(toy, monkeypatch, keep, kept, lora_rank):
    seen = []
    shares = [0.25, 0.75, 0.75, 0.5]

    def scripted(model, tokenizer, task, **options):
        seen.append(model(ids).logits)
        right = round(len(task.items) * shares[len(seen) - 1])
        answers = [0] * right + [1] * (len(task.items) - right)
        return TaskScores("toy", answers, answers, [[0.0, -1.0]] * len(answers), [[1, 1]] * len(answers))

    ids = torch.arange(12).view(1, 12)
    monkeypatch.setattr(loop, "score", scripted)
    model, result = tune(toy, "llama student", epochs=4, keep=keep, lora_rank=lora_rank)
    assert [epoch.accuracy for epoch in result.epochs] == shares
    assert (result.kept, result.accuracy) == (kept, shares[kept - 1])
    assert_close(model(ids).logits, seen[kept - 1], **LOGITS)
    assert (model(ids).logits - seen[0]).abs().max() > 0.01


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_seed_decides_everything_and_the_global_generators_are_left_alone(toy, lora_rank):
    def run(seed):
        torch.manual_seed(torch.seed() % 1000)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        model, result = tune(toy, "gpt2 student", epochs=2, seed=seed, lora_rank=lora_rank)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # noqa: NPY002
        return weights(model), [epoch.loss for epoch in result.epochs]

    first, again, other = run(3), run(3), run(4)
    assert first[1] == again[1]
    assert_close(first[0], again[0], rtol=0, atol=0)
    assert first[1] != other[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward_batch", [1, 5, 24])
def test_the_loss_is_that_of_the_answers_alone_whatever_the_passes(toy, kind, forward_batch):
    model = toy.model(kind)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    items = [replace(item, choices=("left", "right left w1")) for item in toy.task.items]
    expected = []
    for item in items:
        context, answer = (toy.tokenizer.encode(text) for text in STYLES["question"](item)[item.answer])
        logits = model(torch.tensor([context + answer])).logits[0].detach().log_softmax(-1)
        expected += [-float(logits[len(context) - 1 + n, token]) for n, token in enumerate(answer)]
    options = {"learning_rate": 1e-5, "batch_size": 24, "epochs": 1, "keep": "last", "forward_batch": forward_batch}
    result = finetune(model, toy.tokenizer, replace(toy.task, items=items), **options)
    assert result.steps == 1
    assert result.epochs[0].loss == pytest.approx(np.mean(expected), rel=1e-4)


def test_the_first_step_learns_and_the_model_cannot_tell_that_it_was_trained(toy, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    model = toy.model("llama")
    before, config, forward = weights(model), model.config.to_dict(), model.forward
    finetune(model, toy.tokenizer, toy.task, learning_rate=1e-3, batch_size=24, epochs=1, keep="last", progress=False)
    assert changed(model, before) == before.keys()
    assert model.config.to_dict() == config
    assert model.forward == forward
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0: give a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"epochs": 0}, "epochs is 0: give 1 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lora_rank": 0}, "lora_rank is 0"),
        ({"keep": "worst"}, "unknown keep 'worst': choose one of best, last"),
        ({"mixed_precision": "fp8"}, "unknown mixed_precision 'fp8'"),
        ({"test": None}, "give one, or keep='last'"),
        ({"learning_rate": 1e30}, "lower learning_rate"),
    ],
)
def test_bad_input_is_one_line(toy, options, message):
    given = OPTIONS | {"test": toy.task} | options
    with pytest.raises(DoflaError, match=message) as caught:
        finetune(toy.model("llama"), toy.tokenizer, toy.task, **given)
    assert "\n" not in str(caught.value)


def test_several_processes_are_refused(toy, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DoflaError, match="2 processes would each write the result: start one"):
        tune(toy, "llama")


def test_a_failed_low_rank_run_leaves_the_model_as_it_was(toy, monkeypatch):
    model = toy.model("llama student")
    before = weights(model)
    monkeypatch.setattr(loop, "score", lambda *a, **k: (_ for _ in ()).throw(DoflaError("no")))
    with pytest.raises(DoflaError, match="no"):
        finetune(model, toy.tokenizer, toy.task, toy.task, **OPTIONS, lora_rank=2)
    assert_close(weights(model), before, rtol=0, atol=0)
