"""Under FSDP each process holds half of the frozen weights, and makes the student that it makes without."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # before processes fork, of which each would take its time for it
from forks import PATIENCE, in_processes
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import dofla
from dofla.distillation import distill, distill_end_to_end
from dofla.errors import DoflaError
from dofla.storage import processes as module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.__version__ < (2, 7), reason="FSDP leaves parameters whole from torch 2.7 on"),
]

WINDOWS, LENGTH = 7, 16
OPTIONS = {"steps": 4, "batch_size": 1, "lora_rank": 4, "window_dropout": 0.3}
"""The last step takes one window, which leaves one of two processes without."""
CASES = {
    "llama": {"weights": "lora"},
    "llama again": {"weights": "lora", "gradient_checkpointing": True},
    "neox": {"weights": "lora", "precision": "bf16"},
    "neox maps": {"weights": "maps", "gradient_checkpointing": True},
    "bert": {"weights": "maps"},
}


class Stop(Exception):
    pass


def gpt_neox():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 46}
    config = GPTNeoXConfig(**sizes, vocab_size=64, max_position_embeddings=256, initializer_range=0.3)
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(config).eval()


def student_of(tiny, case="llama"):
    family = case.split()[0]
    model = gpt_neox() if family == "neox" else getattr(tiny, family)()
    return dofla.linearize(model, tiny.plan(model, features=6, feature_map="mlp", window=2, sinks=1))


def train(tiny, case="llama", student=None, **options):
    """All tensors of the student of a case, and its losses."""
    student = student or student_of(tiny, case)
    history = distill_end_to_end(student, tiny.padded(WINDOWS, LENGTH), **OPTIONS, **CASES[case], **options)
    return {name: x.clone() for name, x in student.state_dict().items()} | {"losses": history.losses}


def launched_for_fsdp():
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- what comes out ---------------------------------------------------------------------------------------------------


def train_all(tiny, folder):
    launched_for_fsdp()
    for case in CASES:
        save_file(train(tiny, case), folder / f"{case} {os.environ['RANK']}")


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    assert in_processes(2, train_all, tiny, folder) == [0, 0]
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_student_is_that_of_one_process_that_accumulates_twice_as_much(tiny, trained, case):
    first, second = (load_file(trained / f"{case} {rank}") for rank in range(2))
    assert equal(first, second)
    alone = train(tiny, case, accumulate=2)
    assert equal(first, alone)  # to the last bit: a sum of two has one order
    assert not torch.equal(alone["losses"][0], alone["losses"][-1])


# --- what is where ----------------------------------------------------------------------------------------------------


def held(layer):
    """Bytes that this process holds of a layer's own weights."""
    own = [x for name, x in layer.named_parameters() if "lora_" not in name and "dofla" not in name]
    return sum((x.to_local() if isinstance(x, DTensor) else x).untyped_storage().nbytes() for x in own)


def large_tensors(numbers):
    """Everything in this process that holds so many numbers."""
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]  # a weak proxy may be of what is gone
    found = [x for x in tensors if not isinstance(x, DTensor) and x.numel() == numbers]
    return {id(x) for x in found if x.untyped_storage().nbytes()}


def marks(model):
    """Of each module what FSDP changes: its class, its attributes, its parameters and its hooks."""
    return [
        (type(x), set(vars(x)) - {"_dofla_lora"}, list(map(id, x.parameters())), len(x._forward_pre_hooks))
        for x in model.modules()
    ]


def look_inside(tiny):
    launched_for_fsdp()
    student = student_of(tiny)
    layers = list(student.model.layers)
    size, weight = held(layers[0]), layers[0].mlp.gate_proj.weight.numel()
    within, between = [], []

    def look(*_):
        within.append([held(layer) for layer in student.model.layers])

    def look_between(*_):
        between.append([held(layer) for layer in student.model.layers])
        if len(between) == 8:  # neither what was gathered in the steps before, nor copies of what waits in host memory
            assert large_tensors(weight) <= waiting

    waiting = large_tensors(weight)
    assert {id(x) for layer in layers for x in layer.mlp.parameters()} <= waiting  # beside those of other tests
    for layer in layers:
        layer.mlp.register_forward_pre_hook(look)
    student.model.register_forward_pre_hook(look_between)
    before = marks(student)
    train(tiny, student=student)
    assert marks(student) == before
    assert list(student.model.layers) == layers
    assert len(between) > 8
    assert between[-1] == [size // 2, size // 2]
    assert within[-2:] == [[size, size // 2], [size // 2, size]]

    # The modules that were in pieces once can be so again.
    again = dofla.linearize(dofla.restore(student), budget=4)
    assert distill_end_to_end(again, tiny.tokens(4, LENGTH), steps=1, weights="maps").losses.isfinite().all()


def test_each_process_holds_half_of_the_layers_but_the_one_it_computes(tiny):
    assert in_processes(2, look_inside, tiny) == [0, 0]


# --- stopping and going on --------------------------------------------------------------------------------------------


def stop_and_go_on(tiny, folder):
    launched_for_fsdp()
    whole, student = train(tiny), student_of(tiny)
    before = {name: x.clone() for name, x in student.state_dict().items()}

    def stop(*_):
        seen.append(1)
        if len(seen) == 12:
            raise Stop

    seen = []
    hook = student.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        train(tiny, student=student, folder=folder, checkpoint_every=1)
    assert equal(dict(student.state_dict()), before)
    hook.remove()
    steps = []
    options = {"folder": folder, "checkpoint_every": 1, "progress": lambda done, *_: steps.append(done)}
    gone_on = train(tiny, student=student, **options)
    assert equal(gone_on, whole)
    assert steps == ([3, 4] if os.environ["RANK"] == "0" else [])
    if os.environ["RANK"] == "0":
        save_file(whole, folder / "whole")


def test_a_run_that_stopped_goes_on_and_one_process_can_open_it(tiny, tmp_path):
    assert in_processes(2, stop_and_go_on, tiny, tmp_path) == [0, 0]
    assert equal(train(tiny, accumulate=2, folder=tmp_path, checkpoint_every=1), load_file(tmp_path / "whole"))


def fail_in_one(tiny):
    launched_for_fsdp()
    student, first = student_of(tiny), os.environ["RANK"] == "0"
    before = {name: x.clone() for name, x in student.state_dict().items()}

    def fail(*_):
        seen.append(1)
        if len(seen) == 12 and not first:
            raise ValueError("out of luck")

    seen = []
    student.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError if first else ValueError):
        train(tiny, student=student)
    assert equal(dict(student.state_dict()), before)


def test_if_one_process_fails_the_student_of_all_is_as_it_was(tiny):
    assert in_processes(2, fail_in_one, tiny) == [0, 0]


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(tiny, monkeypatch):
    launched_for_fsdp()
    student, tokens = student_of(tiny), tiny.tokens(4, LENGTH)
    with pytest.raises(DoflaError, match=r"weights='all' trains them: choose 'lora' or 'maps'"):
        distill_end_to_end(student, tokens, steps=1, weights="all")
    with pytest.raises(DoflaError, match=r"set up for FSDP 2, .*examples/data_parallel\.yaml.*examples/fsdp\.yaml"):
        distill(student, tokens, steps=1)
    monkeypatch.setattr(import_module("dofla.distillation.sharded"), "layers_of", lambda _: {})
    with pytest.raises(DoflaError, match="LlamaForCausalLM has no layers to take apart: launch data-parallel"):
        distill_end_to_end(student, tokens, steps=1, weights="maps")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(DoflaError, match="set fsdp_cpu_ram_efficient_loading to false"):
        distill_end_to_end(student, tokens, steps=1)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(DoflaError, match=r"set up for FSDP, .*FSDP 2 \(examples/fsdp\.yaml\)"):
        distill_end_to_end(student, tokens, steps=1)


def test_what_fsdp_cannot_do_is_refused_with_the_way_out(tiny, monkeypatch):
    assert in_processes(2, refused, tiny, monkeypatch) == [0, 0]


# --- launched by accelerate -------------------------------------------------------------------------------------------

CONFIG = Path(__file__).parents[3] / "examples" / "fsdp.yaml"
SCRIPT = """
import sys
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
import dofla

def look(module, args):
    pieces.append(any(isinstance(x, DTensor) for x in module.parameters()))

pieces = []
student = dofla.linearize(AutoModelForCausalLM.from_pretrained("."), budget=4)
student.model.register_forward_pre_hook(look)
tokens = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
dofla.distill_end_to_end(student, tokens, steps=2, batch_size=1, lora_rank=4, folder="run")
assert all(pieces[-2:])
"""


def test_accelerate_reads_the_config():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIG))
    assert (config.distributed_type, config.num_processes) == ("FSDP", 2)
    assert config.fsdp_config == {"fsdp_version": 2, "fsdp_cpu_ram_efficient_loading": False}


@pytest.mark.long
def test_accelerate_launches_it(tiny, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "script.py"]
    options = {"cwd": tmp_path, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "timeout": PATIENCE}
    ended = subprocess.run(command, capture_output=True, text=True, **options)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "lora").exists()


@pytest.mark.parametrize("windows", [1, 2, 3, 4])
def test_processes_take_equally_many_turns_and_each_item_counts_once(windows):
    turns = [list(module.Processes(2, place).turns(range(windows))) for place in range(2)]
    assert len(turns[0]) == len(turns[1])
    assert sorted(item for own in turns for item, counts in own if counts) == list(range(windows))
