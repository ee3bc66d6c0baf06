"""Students of the tiny models."""

import json
from pathlib import Path

from transformers import PreTrainedModel

import dofla
from dofla.plans.layers import SoftmaxLayer
from dofla.plans.plan import Plan


def student_of(tiny, model="llama", seed=0, **plan) -> PreTrainedModel:
    """A model of ``tiny``, by its name, or another, with the same layers all through."""
    model = getattr(tiny, model)() if isinstance(model, str) else model
    return dofla.linear.linearize(model, tiny.plan(model, **plan), seed=seed)


def reader_of(tiny, kind="llama", **plan) -> PreTrainedModel:
    """The same with the vocabulary of the demo's tokenizer."""
    return student_of(tiny, getattr(tiny, kind)(vocab_size=2048), **plan)


def keep_softmax(plan, *numbers) -> Plan:
    """The plan, in which these layers stay softmax."""
    for n in numbers:
        own = plan.layers[n]
        plan.layers[n] = SoftmaxLayer(own.name, own.kv_heads, own.head_dim, own.value_dim)
    return plan


def everything(model) -> dict:
    """All that could differ from a model never touched: config, weights, attributes, modes and hooks of each module."""
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "state": list(model.state_dict()),
        "weights": {name: (value.requires_grad, value.tolist()) for name, value in model.named_parameters()},
        "attributes": {name: set(vars(module)) for name, module in model.named_modules()},
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
    }


def without_checksums(folder: Path) -> Path:
    """The folder of a whole model, of which every change is now let pass that can be opened."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["checksums"]
    path.write_text(json.dumps(config))
    return folder
