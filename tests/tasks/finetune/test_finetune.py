"""One loop fine-tunes softmax models and students, all weights or low-rank ones."""

from dataclasses import replace

import pytest
import torch
from arithmetic import LOGITS, sum_error
from torch.testing import assert_close

from dofla.errors import DoflaError
from dofla.integration.checkpoint import load, save_adapter
from dofla.integration.surgery import is_linearized
from dofla.tasks.finetune import finetune, loop
from dofla.tasks.finetune.examples import answers, batches_of, padded
from dofla.tasks.finetune.learner import answer_loss, rate_at
from dofla.tasks.scores import TaskScores
from dofla.tasks.scoring import score

KINDS = ["llama", "llama student", "gpt2", "gpt2 student"]
OPTIONS = {"learning_rate": 1e-2, "batch_size": 4, "epochs": 6}


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model, before):
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def tune(toy, kind, **options):
    model = toy.model(kind)
    return model, finetune(model, toy.tokenizer, toy.task, toy.task, **(OPTIONS | options))


LOW_RANK = {"lora_rank": 8, "learning_rate": 2e-2, "epochs": 16}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, LOW_RANK], ids=["all", "low-rank"])
def test_any_model_learns_the_task_by_the_same_call(toy, kind, options):
    # With the embeddings of random models frozen, low-rank updates can learn a few items by heart, not many.
    task = replace(toy.task, items=toy.task.items[:8]) if options else toy.task
    model = toy.model(kind)
    assert score(model, toy.tokenizer, task).accuracy() < 0.9
    result = finetune(model, toy.tokenizer, task, task, **(OPTIONS | options))
    assert result.accuracy == 1.0
    assert result.epochs[-1].loss < 0.6 * result.epochs[0].loss
    assert result.steps == (32 if options else 36)
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
def test_a_seed_decides_everything_and_the_global_generator_is_left_alone(toy, lora_rank):
    def run(seed):
        torch.manual_seed(torch.seed() % 1000)
        before = torch.get_rng_state()
        model, result = tune(toy, "gpt2 student", epochs=2, seed=seed, lora_rank=lora_rank)
        assert torch.equal(torch.get_rng_state(), before)
        return weights(model), [epoch.loss for epoch in result.epochs]

    first, again, other = run(3), run(3), run(4)
    assert first[1] == again[1]
    assert_close(first[0], again[0], rtol=0, atol=0)
    assert first[1] != other[1]


@pytest.mark.parametrize("kind", KINDS)
def test_neither_padding_nor_the_size_of_passes_changes_anything(toy, kind):
    rows = answers(toy.task, toy.tokenizer, 256)
    assert len({len(row.tokens) for row in rows}) > 1
    model = toy.model(kind)
    alone = sum(answer_loss(model, padded([row])) for row in rows)
    assert_close(answer_loss(model, padded(rows)), alone, rtol=sum_error(len(rows)), atol=0)
    whole, small = (
        [e.loss for e in tune(toy, kind.replace("gpt2", "llama"), epochs=2, forward_batch=n)[1].epochs] for n in (16, 3)
    )
    assert whole == pytest.approx(small, rel=1e-3)


def test_the_loss_is_that_of_the_answer_alone(toy):
    model = toy.model("llama")
    row = answers(toy.task, toy.tokenizer, 256)[5]
    logits = model(torch.tensor([row.tokens])).logits[0].log_softmax(-1)
    expected = -sum(logits[n - 1, row.tokens[n]] for n in range(row.context, len(row.tokens)))
    assert_close(answer_loss(model, padded([row])), expected)


def test_an_epoch_has_every_row_once_in_batches_of_like_lengths(toy):
    rows = answers(toy.task, toy.tokenizer, 256)
    batches = batches_of(rows, 5, seed=1)
    assert sorted(row for batch in batches for row in batch) == sorted(rows)
    assert sorted(map(len, batches)) == [4, 5, 5, 5, 5]
    padding = sum(
        max(len(r.tokens) for r in batch) * len(batch) - sum(len(r.tokens) for r in batch) for batch in batches
    )
    assert padding <= 8
    assert batches != batches_of(rows, 5, seed=2)


def test_the_rate_rises_and_falls_and_is_never_zero():
    for steps in (1, 2, 10, 100):
        rates = [rate_at(step, steps) for step in range(steps)]
        assert max(rates) == 1.0
        assert min(rates) > 0
    assert rates[:7] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 94 / 95], abs=1e-2)
    assert rates[-1] == pytest.approx(1 / 95)


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


def test_a_failed_low_rank_run_leaves_the_model_as_it_was(toy, monkeypatch):
    model = toy.model("llama student")
    before = weights(model)
    monkeypatch.setattr(loop, "score", lambda *a, **k: (_ for _ in ()).throw(DoflaError("no")))
    with pytest.raises(DoflaError, match="no"):
        finetune(model, toy.tokenizer, toy.task, toy.task, **OPTIONS, lora_rank=2)
    assert_close(weights(model), before, rtol=0, atol=0)
