"""A process of several that ends, ends the others."""

from __future__ import annotations

import os
import signal

import pytest
from forks import in_processes

import dofla
from dofla.distillation import distill
from dofla.errors import DoflaError
from dofla.storage import processes as module

KILLED, LEFT = -signal.SIGKILL, 17


def train_until(tiny, end):
    """Process 1 ends in the third step; exit code 17 if the other sees it."""
    student = dofla.linearize(tiny.llama(), tiny.plan(tiny.llama()))

    def look(module, args):
        seen.append(1)
        if os.environ["RANK"] == "1" and len(seen) == 3:
            end()

    seen = []
    student.base_model.register_forward_pre_hook(look)
    left = "^process 0 of 2: the exchange with the other processes broke off: one of them has ended$"
    if os.environ["RANK"] == "0":
        with pytest.raises(DoflaError, match=left):
            distill(student, tiny.tokens(8, 16), batch_size=1, epochs=100)
        os._exit(LEFT)
    distill(student, tiny.tokens(8, 16), batch_size=1, epochs=100)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("out of luck")


@pytest.mark.parametrize(("end", "code"), [(kill, KILLED), (fail, 1)])
def test_the_others_end_with_it(tiny, monkeypatch, end, code):
    monkeypatch.setattr(module, "_GRACE", 0)
    assert in_processes(2, train_until, tiny, end) == [LEFT, code]


def refused(tiny):
    student = dofla.linearize(tiny.llama(), tiny.plan(tiny.llama()))
    student.model.layers[0].self_attn.q_proj.weight.data[0, 0] = float("nan")
    place, what = os.environ["RANK"], r"the loss of layer model\.layers\.0\.self_attn is nan at step 0"
    with pytest.raises(DoflaError, match=f"^process {place} of 2: {what}"):
        distill(student, tiny.tokens(8, 16), batch_size=1, steps=1)


def test_an_error_says_in_which_process_it_came_up(tiny):
    assert in_processes(2, refused, tiny) == [0, 0]
