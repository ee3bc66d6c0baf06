"""Students that are trained, stopped in between, and compared."""

import torch

from dofla.integration.converted import Converted


def feature_maps(student):
    return {
        f"{layer}.{name}": parameter.detach().clone()
        for layer, linear in Converted.of(student).layers.items()
        for name, parameter in linear.named_parameters()
    }


def base_weights(student):
    return {name: value.clone() for name, value in student.state_dict().items() if ".dofla." not in name}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


class Stop(Exception):
    pass


def stop_after(step):
    def progress(done, steps, losses):
        if done == step:
            raise Stop

    return progress
