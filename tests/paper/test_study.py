"""Studies: the shipped ones read, and what they change by scale and by hand."""

import pytest

from dofla.errors import DoflaError
from dofla.paper.methods import STRATEGIES, baselines, over_heads, paper_methods
from dofla.paper.study import SCALES, STUDIES, Study
from dofla.runs.recipe import StudentSpec

NAMES = sorted(path.stem for path in STUDIES.glob("*.yaml"))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_study_is_read_at_every_scale(name, scale):
    study = Study.of(name, scale, 2)
    assert study.model
    assert study.seeds == [0, 1]
    assert study.profile.estimator == "paper"
    assert set(study.finetune.tasks) <= {"recall_near", "continuation", *study.tasks.names}
    known = {"Original", *(spec.name for spec in (*baselines(), *paper_methods()))}
    assert set(study.finetune.methods) <= known
    assert Study.from_dict(study.to_dict()) == study


def test_gpt2_and_pythia_have_the_papers_settings():
    gpt2, pythia = Study.of("gpt2"), Study.of("pythia-1b")
    assert (gpt2.budget, gpt2.lam, gpt2.data.length) == (64, 2**-4, 1024)
    assert (pythia.budget, pythia.lam, pythia.data.length) == (128, 2**-8, 2048)
    assert gpt2.distill.batch_size * gpt2.distill.accumulate == 128
    assert pythia.distill.batch_size * pythia.distill.accumulate == 64
    for study in (gpt2, pythia):
        assert study.distill.epochs == 1
        assert study.distill.steps is None
        assert study.distill.rows is None
        assert study.distill.learning_rates == {}  # the map's own: 0.02 for z, 0.2 for alpha
        assert len(study.tasks.names) == len(study.finetune.tasks) == 7
        assert study.finetune.learning_rate is None  # the paper's, task by task
        assert study.finetune.epochs is None


def test_small_overrides_what_it_names_and_leaves_the_rest():
    full, small = Study.of("demo", "full"), Study.of("demo", "small")
    assert small.distill.steps < full.distill.steps
    assert small.distill.batch_size == full.distill.batch_size
    assert small.lam == full.lam
    general = Study.of("a/folder", changes=["budget=5", "tasks.items=3"])  # has no study of its own
    assert (general.model, general.budget, general.tasks.items) == ("a/folder", 5, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "medium"}, ["medium", "full or small"]),
        ({"seeds": 0}, ["seeds is 0"]),
        ({"changes": ["tasks.color=red"]}, ["demo.yaml", "tasks", "color"]),
        ({"changes": ["budget"]}, ["--set", "budget"]),
    ],
)
def test_a_bad_option_is_named(options, words):
    with pytest.raises(DoflaError, match=".*".join(words)):
        Study.of("demo", **options)


def test_the_papers_rows_are_all_there_and_numbers_over_heads_differ_in_one_option():
    rows = [f"{label}, {loss}" for label in STRATEGIES for loss in ("direct", "softmax", "l2")]
    assert [spec.name for spec in paper_methods()] == rows
    for label, strategy in (("DoF", "dof"), ("DoF + Clip", "dof_clip")):
        of_label = [spec for spec in over_heads() if spec.strategy == strategy]
        options = [(spec.over_heads, spec.per_head) for spec in of_label]
        assert options == [("mean", None), ("q75", None), (StudentSpec("").over_heads, True)]
        assert all(spec.name.startswith(f"{label}, ") for spec in of_label)
