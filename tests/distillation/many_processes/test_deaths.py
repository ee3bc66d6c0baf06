"""A process of several that ends, ends the others."""

import os
import signal

import pytest
from forks import in_processes

import dofla
from dofla.distillation import distill


def train_until(tiny, end):
    """Process 1 ends in the third step."""
    student, seen = dofla.linear.linearize(tiny.llama(), tiny.plan(tiny.llama())), []

    def look(module, args):
        seen.append(1)
        if os.environ["RANK"] == "1" and len(seen) == 3:
            end()

    student.base_model.register_forward_pre_hook(look)
    distill(student, tiny.tokens(8, 16), batch_size=1, epochs=100)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("out of luck")


@pytest.mark.parametrize(("end", "code"), [(kill, -signal.SIGKILL), (fail, 1)])
def test_the_others_end_with_it(tiny, end, code):
    assert in_processes(2, train_until, tiny, end) == [1, code]
