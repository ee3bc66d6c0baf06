"""Models whose layers stay on disk do what models in memory do, and read each layer once."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader
from arithmetic import adam_error, sum_error, with_maps_in_float64
from torch.testing import assert_close

import dofla
from dofla.data import TokenWindows
from dofla.distillation import distill, distill_end_to_end
from dofla.distillation.checkpoint import CURVES, STATE
from dofla.errors import DoflaError
from dofla.feature_maps import MLP, PRF
from dofla.integration.checkpoint import load_model
from dofla.integration.streaming import in_turn, is_streamed
from dofla.integration.student import Student

WINDOWS, LENGTH, LAYERS = 7, 16, 3
HYBRID = {"features": 6, "feature_map": "mlp", "window": 2, "sinks": 1}
OPTIONS = {"steps": 5, "batch_size": 2, "accumulate": 2, "rows": 9}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """Checkpoints by family, in float64: weights in memory and from disk lie differently, and sums go by that."""
    sizes = {"llama": {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}, "gpt2": {"n_layer": LAYERS}}
    found = {}
    for family in ("llama", "gpt2", "bert", "vit"):
        found[family] = tmp_path_factory.mktemp(family)
        getattr(tiny, family)(**sizes.get(family, {})).double().save_pretrained(found[family])
    return found


def opened(folders, family, stream):
    model = load_model(folders[family], stream=stream)
    assert is_streamed(model) == stream
    return model


def student_of(tiny, folders, family="llama", stream=True, **plan):
    model = opened(folders, family, stream)
    return with_maps_in_float64(dofla.linearize(model, tiny.plan(model, **(plan or HYBRID))))


def maps_of(student):
    """Everything in the feature maps, by name."""
    return {f"{n}.{k}": v for n, layer in Student.of(student).layers.items() for k, v in layer.state_dict().items()}


def data_of(tiny, kind):
    if kind == "images":
        return {name: images.double() for name, images in tiny.images(WINDOWS).items()}
    return getattr(tiny, kind)(WINDOWS, LENGTH)


def assert_alike(history, maps, expected_history, expected_maps):
    """Losses and trained maps, but for the order of sums."""
    assert_close(history.losses, expected_history.losses, rtol=sum_error(WINDOWS * LENGTH), atol=0)
    rate = max(max(kind.learning_rates.values()) for kind in (MLP, PRF))
    bound = adam_error(OPTIONS["steps"], rate, sum_error(4 * LENGTH * 4, dtype=torch.float64))  # of 4 windows, 4 heads
    assert_close(maps, expected_maps, rtol=0, atol=bound)


@pytest.fixture
def reads(monkeypatch):
    """Names of the weights that are read from disk, one for each time."""
    names, read = [], OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(
        OffloadedWeightsLoader, "__getitem__", lambda self, name: names.append(name) or read(self, name)
    )
    return names


def test_layers_and_an_output_layer_of_its_own_stay_on_disk(folders):
    model = opened(folders, "llama", True)
    on_disk = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert on_disk == {name for name, _ in model.named_parameters() if ".layers." in name or "lm_head" in name}
    tied = opened(folders, "gpt2", True)
    assert not tied.lm_head.weight.is_meta
    assert not any(parameter.is_meta for name, parameter in tied.named_parameters() if ".h." not in name)


@pytest.mark.parametrize(
    ("family", "data"), [("llama", "tokens"), ("gpt2", "tokens"), ("bert", "padded"), ("vit", "images")]
)
def test_its_profile_is_the_same(tiny, folders, reads, family, data):
    windows, options = data_of(tiny, data), {"samples": 20, "batch_size": 3}
    expected = dofla.profile(opened(folders, family, False), windows, **options)
    seen = []
    found = dofla.profile(opened(folders, family, True), windows, progress=lambda *x: seen.append(x), **options)
    assert [layer.statistics for layer in found.layers] == [layer.statistics for layer in expected.layers]
    assert found.dof() == expected.dof()
    turns = len(found.layers)
    assert [x[1:] for x in seen if x[0] == "reading"] == [(n + 1, 3 * turns) for n in range(3 * turns)]
    # Once to look at the attention of the model, and once for all the text.
    assert {reads.count(name) for name in reads} <= {1, 2}


CASES = {
    "hybrid": ("llama", "tokens", HYBRID, {}),
    "padded": ("llama", "padded", {"features": [5, 3]}, {"loss": "softmax"}),
    "kept softmax": ("gpt2", "tokens", {"features": 6}, {"loss": "l2"}),
    "own inputs": ("llama", "tokens", HYBRID, {"own_inputs": 0.5}),
    "encoder": ("bert", "padded", HYBRID, {}),
    "images": ("vit", "images", {"features": 6}, {}),
}


def trained(tiny, folders, case, stream, **more):
    family, data, sizes, options = CASES[case]
    model = opened(folders, family, stream)
    plan = tiny.plan(model, **sizes)
    plan.layers[1].keep_softmax = case == "kept softmax"
    student = with_maps_in_float64(dofla.linearize(model, plan))
    history = distill(student, data_of(tiny, data), **OPTIONS, **options, **more)
    return history, maps_of(student)


@pytest.mark.parametrize("case", CASES)
def test_it_is_distilled_to_the_same_student(tiny, folders, case):
    expected, maps = trained(tiny, folders, case, False)
    seen = []
    found, own = trained(tiny, folders, case, True, progress=lambda step, steps, _: seen.append((step, steps)))
    assert found.layers == expected.layers
    assert_alike(found, own, expected, maps)
    assert seen[-1][0] == seen[-1][1]
    assert [step for step, _ in seen] == sorted(step for step, _ in seen)


def test_each_layer_is_read_once_for_all_steps(tiny, folders, reads):
    student = student_of(tiny, folders)
    reads.clear()
    distill(student, tiny.tokens(WINDOWS, LENGTH), from_data=False, **OPTIONS)
    layers = {name for name, parameter in student.named_parameters() if parameter.is_meta and ".layers." in name}
    assert sorted(name for name in reads if name in layers) == sorted(layers)


def test_it_is_evaluated_alike(tiny, folders):
    windows = TokenWindows.of(tiny.tokens(WINDOWS, LENGTH))
    one, other = (dofla.evaluate(student_of(tiny, folders, stream=stream), windows) for stream in (True, False))
    assert one == other


@pytest.mark.long
def test_its_error_curves_are_the_same(tiny, folders):
    windows = TokenWindows.of(tiny.tokens(WINDOWS, LENGTH))
    one, other = (
        dofla.measure_curves(opened(folders, "llama", stream), windows, 4, steps=2, held_out=1, rows=4).layers
        for stream in (True, False)
    )
    assert one == other


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [3, 10])
def test_an_interrupted_run_goes_on_in_the_layer_where_it_was(tiny, folders, tmp_path, at):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    whole = student_of(tiny, folders)
    expected = distill(whole, tokens, **OPTIONS)

    def stop(step, steps, losses):
        if step == at:
            raise Stop

    options = OPTIONS | {"folder": tmp_path, "checkpoint_every": 2}
    student = student_of(tiny, folders)
    with pytest.raises(Stop):
        distill(student, tokens, progress=stop, **options)
    with torch.no_grad():  # it is left as a model that works
        student(tokens, use_cache=False)
    steps, again = [], student_of(tiny, folders)
    history = distill(again, tokens, progress=lambda step, *_: steps.append(step), **options)
    layer, done = divmod(at, OPTIONS["steps"])
    assert steps[0] == layer * OPTIONS["steps"] + done - done % 2 + 1
    assert_alike(history, maps_of(again), expected, maps_of(whole))
    names = [f"{Path(STATE).stem}-model.layers.{n}.safetensors" for n in range(LAYERS)]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, CURVES])


def test_a_window_that_was_not_run_before_is_missed(tiny, folders):
    model, tokens = opened(folders, "llama", True), tiny.tokens(4, LENGTH)
    first, second = ({"input_ids": tokens[n : n + 2]} for n in (0, 2))
    turns = in_turn(model)
    next(turns).carry([first])
    with pytest.raises(DoflaError, match="a window was not run through the layer before"):
        next(turns).carry([second])
    turns.close()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, opened(folders, "llama", False)(tokens).logits)


def test_what_cannot_be_streamed_is_refused(tiny, folders):
    student, tokens = student_of(tiny, folders), tiny.tokens(WINDOWS, LENGTH)
    with pytest.raises(DoflaError, match="'direct' takes gradients through all layers"):
        distill(student, tokens, loss="direct")
    with pytest.raises(DoflaError, match="end-to-end training needs the whole model in memory"):
        distill_end_to_end(student, tokens)


def test_layers_with_something_between_them_are_refused(tiny, folders, monkeypatch):
    student = student_of(tiny, folders)
    norm = student.model.norm
    layers = student.model.layers

    def forward(ids, **options):
        hidden = student.model.embed_tokens(ids)
        for layer in layers:
            hidden = norm(layer(hidden))
        return hidden

    monkeypatch.setattr(student.model, "forward", lambda input_ids, **options: forward(input_ids))
    with pytest.raises(DoflaError, match="the layers of LlamaForCausalLM do not simply follow one another"):
        next(in_turn(student))


def test_turns_of_a_model_in_memory_are_one(tiny, folders):
    turns = list(itertools.islice(in_turn(opened(folders, "llama", False)), 5))
    assert [(turn.number, turn.count, turn.prefix) for turn in turns] == [(0, 1, "")]
