"""The direct loss: the next-token loss of the linearized model, whose gradient reaches the feature maps alone."""

import pytest
import torch
import torch.nn.functional as F
from students import student_of

from dofla.data import TokenWindows
from dofla.distillation import distill
from dofla.distillation.gradients import next_token_gradients
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.integration.converted import Converted


def gradients(student):
    return [p.grad.clone() for layer in Converted.of(student).layers.values() for p in layer.parameters()]


@pytest.mark.parametrize("padded", [False, True])
def test_it_is_the_next_token_loss_of_the_student(tiny, padded):
    windows = TokenWindows.of(tiny.padded(4, 12) if padded else tiny.tokens(4, 12))
    history = distill(student_of(tiny), windows, loss="direct", steps=1, batch_size=4, learning_rates={"z": 1e-9})
    fresh = next_token_figures(student_of(tiny), windows, batch_size=4)
    assert history.layers == ["direct"]
    assert history.losses[0, 0].item() == pytest.approx(fresh["loss"], rel=1e-5)


def test_its_gradient_is_that_of_the_whole_model_and_no_other_weight_has_one(tiny):
    student, tokens = student_of(tiny), tiny.tokens(4, 12)
    next_token_gradients(student, Converted.of(student).layers, [{"input_ids": tokens[:2]}, {"input_ids": tokens[2:]}])
    ours = gradients(student)
    assert all(p.grad is None for name, p in student.named_parameters() if ".dofla." not in name)
    assert all(p.requires_grad for p in student.parameters())

    student.zero_grad()
    logits = student(tokens).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for a, b in zip(ours, gradients(student), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        assert a.abs().max() > 0


def test_a_model_that_predicts_no_next_token_is_refused(tiny):
    with pytest.raises(DoflaError, match="BertModel predicts no next token; train it with softmax or l2"):
        distill(student_of(tiny, tiny.bert()), tiny.tokens(8, 12), loss="direct")
