"""A linearized model trains as any other."""

import pytest
import torch
from tiny_families import CAUSAL, own_student, tokens
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from dofla.integration.converted import Converted

FAMILIES = [*[(family, "plain") for family in CAUSAL], ("llama", "ragged"), ("gpt2", "softmax_first")]


def gradients(model):
    ids = tokens(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_all_weights_get_gradients_which_checkpointing_does_not_change(family, kind):
    model = own_student(family, kind).train()
    found = gradients(model)
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
    for name, layer in Converted.of(model).layers.items():
        assert layer.training
        for key, _ in layer.named_parameters():
            assert found[f"{name}.dofla.{key}"].abs().max() > 0, (name, key)
    without = [name for name, p in model.named_parameters() if name not in found and "position" not in name]
    assert without == []
    model.gradient_checkpointing_enable()
    assert_close(gradients(model), found)


def test_a_step_along_the_gradient_lowers_the_loss():
    model = own_student("llama", "ragged").train()
    maps = {id(p) for layer in Converted.of(model).layers.values() for p in layer.parameters()}
    for chosen in (lambda p: id(p) in maps, lambda p: id(p) not in maps):
        ids = tokens(2, 40)
        loss = model(ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        step = [(p, p.grad) for p in model.parameters() if chosen(p)]
        norm = sum(g.square().sum() for _, g in step)
        with torch.no_grad():
            for p, g in step:
                p -= 1e-3 * g / norm.sqrt()
            fallen = loss - model(ids, labels=ids).loss
        assert fallen.item() == pytest.approx(1e-3 * norm.sqrt().item(), rel=0.05)


def test_the_stock_trainer_trains_a_student_and_one_opened_from_disk(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 2, "use_cpu": True, "report_to": []}

    def train(model, folder):
        before = {name: p.clone() for name, p in model.named_parameters()}
        Trainer(model, TrainingArguments(folder, disable_tqdm=True, **options), train_dataset=data).train()
        assert all(not torch.equal(before[name], p) for name, p in model.named_parameters())
        opened = type(model).from_pretrained(folder / "checkpoint-2")
        assert_close(opened.state_dict(), model.state_dict(), rtol=0, atol=0)
        return opened

    train(train(own_student("llama"), tmp_path / "first"), tmp_path / "second")
