"""Distillation: what it changes, what it leaves alone, and that it can stop and go on."""

import itertools
import json
import math
import shutil
import warnings

import pytest
import torch
from arithmetic import adam_error, in_float64, sum_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stopping import Stop, base_weights, equal, feature_maps, stop_after
from students import keep_softmax, student_of
from transformers import Cache

import dofla
from dofla.data import TokenWindows
from dofla.distillation import DIRECT, LOSSES, distill
from dofla.distillation.checkpoint import CURVES, STATE
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.feature_maps import PRF
from dofla.integration.converted import Converted

WINDOWS, LENGTH = 8, 16
every_loss = pytest.mark.parametrize("loss", sorted([*LOSSES, DIRECT]))


def divergences(student, tokens):
    figures = attention_fidelity(Converted.of(student), TokenWindows.of(tokens))
    return [layer.kl for layer in figures.values()]


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("plan", [{"features": 8}, {"features": [10, 4], "window": 2, "sinks": 1}])
def test_the_loss_of_every_layer_falls(tiny, loss, plan):
    student, tokens = student_of(tiny, **plan), tiny.tokens(WINDOWS, LENGTH)
    history = distill(student, tokens, loss=loss, steps=40, batch_size=WINDOWS, context=LENGTH)
    assert history.layers == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert history.losses.shape == (40, 2)
    assert torch.isfinite(history.losses).all()
    # The squared error of a kernel looks at the few largest pairs only, and falls slowly.
    least = {"softmax": 0.05, "output": 0.05, "l2": 0.003}[loss]
    assert (history.losses[-1] < history.losses[0] - least).all()
    assert history.seconds > 0


def test_what_is_learned_is_the_teachers_attention(tiny):
    student, tokens = student_of(tiny), tiny.tokens(WINDOWS, LENGTH)
    before = divergences(student, tokens)
    history = distill(student, tokens, loss="softmax", steps=30, batch_size=WINDOWS)
    assert history.losses[0].tolist() == pytest.approx(before, rel=1e-4)  # the loss before each step
    assert sum(divergences(student, tokens)) < 0.8 * sum(before)


def test_learning_rates_fall_along_a_cosine(tiny):
    # Adam's steps are at most about as long as the rate, and the first is exactly so wherever there is a gradient.
    student, tokens = student_of(tiny), tiny.tokens(WINDOWS, LENGTH)
    trail, rates = [feature_maps(student)], {"z": 1e-3, "log_alpha": 1e-2}
    options = {"steps": 10, "batch_size": WINDOWS, "learning_rates": rates}
    distill(student, tokens, **options, progress=lambda *_: trail.append(feature_maps(student)))
    for name in trail[0]:
        moves = [(later[name] - earlier[name]).abs().max().item() for earlier, later in itertools.pairwise(trail)]
        rate = rates[name.rpartition(".")[2]]
        assert moves[0] == pytest.approx(rate, rel=1e-2)
        assert all(move <= 1.5 * rate * (1 + math.cos(math.pi * n / 10)) / 2 for n, move in enumerate(moves))


@every_loss
def test_only_feature_maps_change(tiny, loss):
    student, tokens = student_of(tiny), tiny.tokens(WINDOWS, LENGTH)
    base, maps = base_weights(student), feature_maps(student)
    distill(student, tokens, loss=loss, steps=3)
    assert equal(base_weights(student), base)
    assert all(parameter.grad is None for parameter in student.parameters())
    assert not any(torch.equal(value, maps[name]) for name, value in feature_maps(student).items())


def test_the_students_modes_are_left_as_they_were(tiny):
    student, tokens = student_of(tiny, tiny.gpt2(attn_pdrop=0.5, resid_pdrop=0.5)), tiny.tokens(WINDOWS, LENGTH)
    with torch.no_grad():
        before = student(tokens).logits
    calm = distill(student, tokens, steps=1).losses
    student = student_of(tiny, tiny.gpt2(attn_pdrop=0.5, resid_pdrop=0.5)).train()
    with torch.no_grad():  # nor does it matter whether gradients are on
        assert torch.equal(distill(student, tokens, steps=1).losses, calm)
        assert not torch.is_grad_enabled()
    assert all(module.training for module in student.modules())
    with torch.no_grad():
        assert not torch.allclose(student.eval()(tokens).logits, before)


def test_no_gradient_crosses_layers(tiny):
    together, tokens = student_of(tiny), tiny.tokens(WINDOWS, LENGTH)
    untrained = feature_maps(together)
    both = distill(together, tokens, steps=5)
    for number, name in enumerate(("model.layers.0.self_attn", "model.layers.1.self_attn")):
        model = tiny.llama()
        dofla.linear.linearize(model, keep_softmax(tiny.plan(model), 1 - number))
        own = Converted.of(model).layers[name]
        with torch.no_grad():
            for key, parameter in own.named_parameters():
                parameter.copy_(untrained[f"{name}.{key}"])
        alone = distill(model, tokens, steps=5)
        assert torch.equal(alone.losses[:, 0], both.losses[:, number])
        trained = feature_maps(together)
        assert all(torch.equal(p, trained[f"{name}.{key}"]) for key, p in own.named_parameters())


def test_the_teacher_fills_no_cache(tiny):
    student, caches = student_of(tiny), []

    def look(module, args, kwargs):
        caches.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Cache))

    for layer in student.model.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    assert student.config.use_cache
    distill(student, tiny.tokens(WINDOWS, LENGTH), steps=1)
    assert caches == []


def test_a_half_precision_teacher_trains_float32_features(tiny):
    student, tokens = student_of(tiny, tiny.llama().bfloat16()), tiny.tokens(WINDOWS, LENGTH)
    history = distill(student, tokens, steps=30, batch_size=WINDOWS)
    assert {parameter.dtype for parameter in feature_maps(student).values()} == {torch.float32}
    assert student.dtype == torch.bfloat16
    assert (history.losses[-1] < history.losses[0] - 0.05).all()


def test_padded_encoders_and_images_are_distilled(tiny):
    for model, windows in ((tiny.bert(), tiny.padded(WINDOWS, LENGTH)), (tiny.vit(), tiny.images(WINDOWS))):
        losses = distill(student_of(tiny, model), windows, steps=20, batch_size=4, rows=3).losses
        assert torch.isfinite(losses).all()
        assert losses[-5:].mean() < losses[:5].mean()


@pytest.mark.parametrize("windows", [WINDOWS, WINDOWS - 1])  # batches count by their windows
def test_accumulating_two_batches_is_one_batch_of_twice_the_size(tiny, windows):
    tokens = tiny.tokens(windows, LENGTH)
    split, whole = (in_float64(student_of(tiny)) for _ in range(2))
    # Not so for the output loss, whose squared error is relative to each batch's own square.
    first = distill(split, tokens, loss="softmax", steps=3, batch_size=2, accumulate=2)
    second = distill(whole, tokens, loss="softmax", steps=3, batch_size=4)
    torch.testing.assert_close(first.losses, second.losses, rtol=sum_error(4 * LENGTH), atol=0)
    rate = max(PRF.learning_rates.values())
    bound = adam_error(3, rate, sum_error(4 * LENGTH * 4, dtype=torch.float64))  # rows of 4 windows and 4 heads
    torch.testing.assert_close(feature_maps(split), feature_maps(whole), rtol=0, atol=bound)


def batches_seen(student, tokens, **options):
    seen = []
    hook = student.base_model.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    distill(student, tokens, **options)
    hook.remove()
    numbers = {tuple(window): n for n, window in enumerate(tokens.tolist())}
    return [[numbers[tuple(window)] for window in batch.tolist()] for batch in seen]


def test_the_last_step_of_an_epoch_takes_the_windows_that_are_left(tiny):
    tokens = tiny.tokens(7, LENGTH)
    seen = batches_seen(student_of(tiny), tokens, batch_size=2, accumulate=2, steps=5)
    assert [len(batch) for batch in seen] == [2, 2, 2, 1, 2, 2, 2, 1, 2, 2]
    for start in (0, 4):
        assert {window for batch in seen[start : start + 4] for window in batch} == set(range(7))
    assert seen[:4] != seen[4:8]
    assert seen != batches_seen(student_of(tiny), tokens, batch_size=2, accumulate=2, steps=5, seed=1)
    assert batches_seen(student_of(tiny), tokens, batch_size=2, accumulate=2, epochs=2) == seen[:8]


def test_rows_are_drawn_anew_for_each_step_by_the_seed_and_progress_is_reported(tiny, monkeypatch):
    drawn = []

    def spy(call, layer, rows):
        drawn.append((call.name, rows))
        return LOSSES["softmax"](call, layer, rows)

    monkeypatch.setitem(LOSSES, "spy", spy)
    runs, seen = [], []
    for seed, steps in ((3, 40), (3, 3), (4, 3)):
        options = {"rows": 5, "seed": seed, "progress": lambda *x: seen.append(x)}
        runs.append(distill(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), loss="spy", steps=steps, **options))
    first, again, other = (run.losses[0] for run in runs)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert [(done, steps) for done, steps, _ in seen] == [
        (n + 1, len(x.losses)) for x in runs for n in range(len(x.losses))
    ]
    for row, (_, _, losses) in zip(runs[0].losses, seen[:40], strict=True):
        assert list(losses) == runs[0].layers
        torch.testing.assert_close(torch.tensor(list(losses.values())), row)
    rows = torch.stack([rows for name, rows in drawn if name == "model.layers.0.self_attn"])[:40]
    assert rows.shape == (40, 5)
    assert (rows.diff(dim=1) > 0).all()
    assert len(rows.unique(dim=0)) > 33
    assert set(rows.flatten().tolist()) == set(range(LENGTH))


def test_all_rows_are_looked_at_unless_fewer_are_asked_for(tiny):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    every, same, more, fewer = (
        distill(student_of(tiny), tokens, steps=2, rows=rows).losses for rows in (None, LENGTH, 1000, LENGTH - 1)
    )
    assert torch.equal(same, every)
    assert torch.equal(more, every)
    assert not torch.equal(fewer, every)


OPTIONS = {"loss": "softmax", "steps": 6, "batch_size": 2, "accumulate": 2, "rows": 9}
FROM_DATA = {"features": [5, 3], "feature_map": "mlp", "window": 2, "sinks": 1}
"""With statistics and levels that are set once, at the start of the run."""


@pytest.mark.parametrize(
    ("stop", "checkpoint_every", "process", "plan"),
    [
        (1, 1, "a new one", FROM_DATA),
        (1, 50, "the same", FROM_DATA),
        (3, 2, "a new one", {}),
        (3, 50, "a new one", FROM_DATA),
        (5, 1, "the same", {}),
    ],
)
def test_an_interrupted_run_ends_as_if_it_had_not_been(tiny, tmp_path, checkpoint_every, stop, process, plan):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    whole = student_of(tiny, **plan)
    expected = distill(whole, tokens, **OPTIONS)

    student = student_of(tiny, **plan)
    options = OPTIONS | {"folder": str(tmp_path), "checkpoint_every": checkpoint_every}
    with pytest.raises(Stop):
        distill(student, tokens, progress=stop_after(stop), **options)
    if process == "a new one":
        # With other features than it started with: those in the folder count.
        student = student_of(tiny, seed=17, **plan)
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = distill(student, tokens, progress=lambda done, *_: steps.append(done), **options)
    saved = stop - stop % checkpoint_every
    assert steps == list(range(saved + 1, 7))
    opened = student_of(tiny, seed=5, **plan)  # the run is finished: nothing is repeated
    again = distill(opened, tokens, progress=lambda done, *_: steps.append(done), **options)
    assert len(steps) == 6 - saved
    for found, model in ((history, student), (again, opened)):
        assert torch.equal(found.losses, expected.losses)
        assert equal(model.state_dict(), whole.state_dict())
    data = json.loads((tmp_path / CURVES).read_text())
    assert data["loss"] == "softmax"
    assert list(data["layers"]) == history.layers
    torch.testing.assert_close(torch.tensor(list(data["layers"].values())).T, history.losses)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([STATE, CURVES])


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """The folder of a finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("finished")
    distill(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), folder=folder, **OPTIONS)
    return folder


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss": "l2"}, "loss"),
        ({"seed": 1}, "seed"),
        ({"batch_size": 4, "accumulate": 1}, "batch_size"),
        ({"rows": None}, "rows"),
        ({"steps": 7}, "steps"),
        ({"learning_rates": {"z": 0.1}}, "learning_rates"),
        ({"tokens": 1}, "data"),
        ({"mask": True}, "data"),
        ({"windows": 9}, "windows"),
        ({"plan": {"features": 9}}, "plan"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_kept(tiny, finished, change, named):
    state, options = (finished / STATE).read_bytes(), OPTIONS | change
    tokens = tiny.tokens(options.pop("windows", WINDOWS), LENGTH, seed=options.pop("tokens", 0))
    if options.pop("mask", False):
        mask = torch.ones_like(tokens)
        mask[0, -1] = 0
        tokens = {"input_ids": tokens, "attention_mask": mask}
    student = student_of(tiny, **options.pop("plan", {}))
    with pytest.raises(DoflaError, match=f"{STATE} belongs to a run with another {named}:"):
        distill(student, tokens, folder=finished, **options)
    assert (finished / STATE).read_bytes() == state


def rewrite(path, change):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:1000]),
        lambda path: rewrite(path, lambda tensors, metadata: tensors.pop("curve")),
        lambda path: rewrite(
            path, lambda tensors, metadata: tensors.pop("model.layers.1.self_attn.groups.0.map.z:exp_avg")
        ),
        lambda path: rewrite(path, lambda tensors, metadata: tensors.pop("model.layers.1.self_attn.groups.0.map.z")),
        lambda path: rewrite(path, lambda tensors, metadata: metadata.pop("settings")),
        lambda path: rewrite(path, lambda tensors, metadata: metadata.update(settings="{")),
    ],
    ids=["cut off", "no curve", "no moment", "no weights", "no settings", "half the settings"],
)
def test_a_damaged_state_is_one_line_naming_the_file(tiny, finished, tmp_path, damage):
    folder = shutil.copytree(finished, tmp_path / "run")
    damage(folder / STATE)
    with pytest.raises(DoflaError, match=f"{folder / STATE} is damaged"):
        distill(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), folder=folder, **OPTIONS)


def test_a_folder_that_cannot_be_made_is_one_line(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DoflaError, match=r"cannot write .*run: Not a directory"):
        distill(student_of(tiny), tiny.tokens(WINDOWS, LENGTH), folder=tmp_path / "file" / "run")


def test_nan_names_layer_and_step_saves_nothing_of_it_and_leaves_nothing_behind(tiny, tmp_path):
    tokens = tiny.tokens(WINDOWS, LENGTH)
    whole = student_of(tiny)
    expected = distill(whole, tokens, **OPTIONS)

    student = student_of(tiny)
    # Between the layers, so that the first has its gradients already when the second fails.
    weight = student.model.layers[0].mlp.down_proj.weight
    healthy, states = weight.detach().clone(), []

    def poison(done, steps, losses):
        states.append((tmp_path / STATE).read_bytes())
        if done == 3:
            with torch.no_grad():
                weight[0, 0] = torch.nan

    with pytest.raises(DoflaError, match=r"the loss of layer model\.layers\.1\.self_attn is nan at step 3"):
        distill(student, tokens, folder=tmp_path, checkpoint_every=1, progress=poison, **OPTIONS)
    assert (tmp_path / STATE).read_bytes() == states[-1]
    assert len(states) == 3

    with torch.no_grad():
        weight.copy_(healthy)
    history = distill(student, tokens, folder=tmp_path, checkpoint_every=1, **OPTIONS)
    assert torch.equal(history.losses, expected.losses)
    assert equal(feature_maps(student), feature_maps(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "huber"}, "unknown loss 'huber': choose one of direct, l2, output, softmax"),
        ({"batch_size": 3, "accumulate": 3}, "8 windows are too few for one step of 9"),
        *(({name: 0}, f"{name} is 0") for name in ("batch_size", "accumulate", "epochs", "steps", "rows")),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"learning_rates": {"beta": 1.0}}, "learning_rates names 'beta': the feature maps have log_alpha, z"),
        ({"learning_rates": {"z": 0.0}}, "the learning rate of 'z' is 0.0"),
        ({"learning_rates": {"z": math.nan}}, "the learning rate of 'z' is nan"),
    ],
)
def test_a_bad_option_is_one_line_with_the_way_out(tiny, options, message):
    student = student_of(tiny)
    before = feature_maps(student)
    with pytest.raises(DoflaError, match=message):
        distill(student, tiny.tokens(WINDOWS, LENGTH), **options)
    assert equal(feature_maps(student), before)


def test_what_has_nothing_to_train_is_refused(tiny):
    model, tokens = tiny.llama(), tiny.tokens(WINDOWS, LENGTH)
    with pytest.raises(DoflaError, match="not converted"):
        distill(model, tokens)
    dofla.linear.linearize(model, keep_softmax(tiny.plan(model), 0, 1))
    with pytest.raises(DoflaError, match="nothing to train"):
        distill(model, tokens)
