"""The page: what it says of runs and frontiers, without a network; and folders that lack something."""

import html
import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import vl_convert
from command_line import call, refused
from hypothesis import given
from hypothesis import strategies as st

from dofla.display import figure, size
from dofla.errors import DoflaError
from dofla.plans.layers import FeatureLayer, SoftmaxLayer
from dofla.plans.plan import Plan
from dofla.report import write_report
from dofla.report.runs import ModelRecord, read_run
from dofla.runs.frontier import FRONTIER, Frontier, Point
from dofla.storage.files import read_json, write_json

OF_A_RUN = [
    "Loss increase against bytes of the cache",
    "Error of each layer's attention output",
    "Bytes of each layer",
    "Training losses",
    "Degrees of freedom of each KV head (λ = 0.00391)",
]


class Page:
    """A page taken apart."""

    def __init__(self, *folders, out, **options):
        source = write_report(folders, out, **options).read_text()
        assert "default-src 'none'" in source
        self.body = source.partition("<body>")[2].partition("<footer>")[0]
        assert not re.search(r"\b(src|href)=", self.body)
        assert source.count("vegaEmbed(spec") == 1
        specs = re.findall(r'<script type="application/json">(.*?)</script>', self.body)
        self.charts = dict(zip(self.texts("figcaption"), map(json.loads, specs), strict=True))
        for spec in self.charts.values():
            vl_convert.vegalite_to_svg(spec)
        lines = self.texts("tr", keep=True)
        self.rows = [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines]

    def texts(self, tag, keep=False):
        found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", self.body, re.DOTALL)
        return found if keep else [html.unescape(re.sub("<[^>]+>", "", text)) for text in found]

    def values(self, title, field):
        """Of all points of a chart."""
        return [row[field] for rows in self.charts[title]["datasets"].values() for row in rows if field in row]


@pytest.fixture
def copied(llama_run, tmp_path):
    """A run that a test may damage."""
    return shutil.copytree(llama_run, tmp_path / "run")


def test_a_run(llama_run, tmp_path):
    page, models = Page(llama_run, out=tmp_path / "page.html"), read_run(llama_run).models
    assert page.texts("h1") == ["llama"]
    assert sorted(page.charts) == sorted(OF_A_RUN)
    head, *rows = page.rows
    assert [row[0] for row in rows] == [model.name for model in models]
    assert [model.lost for model in models] == sorted(model.lost for model in models)
    for model, row in zip(models, rows, strict=True):
        cells, runs = dict(zip(head, row, strict=True)), [x["language"] for x in model.evaluations]
        mean = sum(run["loss_increase"] for run in runs) / 2
        spread = abs(runs[0]["loss_increase"] - runs[1]["loss_increase"]) / 2
        assert cells["loss increase"] == f"{figure(mean)} ± {figure(spread)}"
        assert cells["cache"] == size(model.evaluations[0]["state_bytes"])
        assert (cells["training"] == "none") == (model.name == "Performer")
        first = model.evaluations[0]
        factor = first["softmax_bytes"] / first["state_bytes"]
        assert float(cells["compression factor"]) == pytest.approx(factor, rel=0.01)
    (said,) = re.findall(r'<p class="verdict">(.*?)</p>', page.body.partition("<section>")[2])
    assert said.startswith(f"{models[0].name}: ")
    assert "perplexity" in said
    assert set(page.values("Training losses", "training")) == {"layerwise, output", "end to end, kl"}
    title, found = "Bytes of each layer", dict.fromkeys((model.name for model in models), 0.0)
    for label, count in zip(page.values(title, "model"), page.values(title, "bytes"), strict=True):
        found[label] += 1024 * count
    assert found == {x.name: pytest.approx(x.evaluations[0]["state_bytes"]) for x in models}
    sizes = page.values(title, "sizes")
    assert "softmax attention" in sizes
    assert any("window 4" in words for words in sizes)
    texts = page.body.partition("<h2>Texts</h2>")[2]
    assert [texts.count(f"<b>{name}:</b>") for name in ("Prompt", "original", "DoF")] == [1, 1, 1]


def test_a_compression_beside_a_distillation(llama_run, compressed_run, tmp_path):
    page = Page(compressed_run, llama_run, out=tmp_path / "page.html")
    assert page.texts("h1") == ["llama"]
    (row,) = (row for row in page.rows if row[0] == "Compressed (compressed-run)")
    assert "none" in row
    assert {"DoF (llama-run)", "Performer (llama-run)"} < {row[0] for row in page.rows}
    assert any("3-bit" in words for words in page.values("Bytes of each layer", "sizes"))
    assert OF_A_RUN[-1] in page.charts


def test_too_few_windows_have_no_interval(copied, tmp_path):
    for path in copied.rglob("evaluation.json"):
        figures = read_json(path, "an evaluation")
        figures["language"]["loss_increase_interval"] = None
        write_json(path, figures)
    page = Page(copied, out=tmp_path / "page.html")
    head, *rows = page.rows
    assert {dict(zip(head, row, strict=True))["95 % interval"] for row in rows} == {"none"}
    assert "So few windows have no 95 % interval" in page.body


def test_an_encoder(bert_run, tmp_path):
    page = Page(bert_run, out=tmp_path / "page.html")
    assert "cosine of embeddings" in page.rows[0]
    assert "cache" not in page.rows[0]
    assert OF_A_RUN[0] not in page.charts
    assert "embeddings agree by" in page.body
    assert "dofla generate" not in page.body


def test_several_folders_share_a_page(llama_run, bert_run, copied, tmp_path):
    frontier(tmp_path / "found")
    page = Page(llama_run, bert_run, copied, tmp_path / "found", out=tmp_path / "page.html")
    assert page.texts("h1") == ["small", "llama", "bert"]
    rows = [row for row in page.rows if row[0] in ("DoF (llama-run)", "DoF (run)")]
    assert len(rows) == 2
    assert rows[0][1:] == rows[1][1:]
    same = shutil.copytree(copied, tmp_path / "other" / copied.name)
    page = Page(copied, same, out=tmp_path / "page.html")
    assert {f"DoF ({copied})", f"DoF ({same})"} <= {row[0] for row in page.rows}


@given(features=st.integers(1, 200), window=st.integers(0, 200), length=st.integers(1, 4000), kept=st.integers(0, 2))
def test_the_context_from_which_on_the_cache_is_smaller(features, window, length, kept):
    own = [SoftmaxLayer("x", 2, 8, 8), FeatureLayer("x", 2, 8, 8, features, window)]
    plan = Plan([replace(own[n >= kept], name=str(n)) for n in range(2)])
    evaluation = {"length": length, "softmax_bytes": plan.softmax_bytes(length)}
    smaller_from = ModelRecord("model", None, 0, plan, [evaluation]).smaller_from

    def smaller(tokens):
        return plan.cache_bytes(tokens) < plan.softmax_bytes(tokens)

    if kept == 2:
        assert smaller_from is None
    else:
        assert smaller(smaller_from)
        assert not smaller(smaller_from - 1)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=300))
def test_a_training_curve_keeps_the_mean_in_few_points(tmp_path_factory, losses):
    folder = tmp_path_factory.mktemp("model")
    (folder / "distill").mkdir()
    record = {"loss": "output", "layers": {"0": losses, "1": [2 * loss for loss in losses]}}
    write_json(folder / "distill" / "losses.json", record)
    ((name, curve),) = ModelRecord("model", folder, 0, Plan([]), []).training_curves()
    steps, means = zip(*curve, strict=True)
    assert name == "layerwise, output"
    assert len(curve) == min(len(losses), 80)
    assert 1 <= steps[0] <= steps[-1] <= len(losses)
    assert min(losses) * 1.5 - 1e-9 <= min(means) <= max(means) <= max(losses) * 1.5 + 1e-9


def frontier(folder, target=0.02, english="english"):
    """What dofla frontier writes, of two texts and two lengths."""
    points = []
    for text, scale in ((english, 1), ("python & co", 1.5)):
        for length, low in ((512, 0.01), (2048, 0.03)):
            for budget in (32, 64, 128):
                loss = scale * low * (64 / budget) ** 1.2
                points.append(
                    Point(budget, 23_600 * budget, text, length, loss, [loss - 0.004, loss + 0.006], 1.1 * loss)
                )
    model = {"class": "LlamaForCausalLM", "name": "somewhere/small", "parameters": 135_000_000}
    made, cache = {"source": "books (train)", "tokens": 6144}, {512: 11_796_480, 2048: 47_185_920}
    found = Frontier(points, cache, target, model, made, {english: "e (all)", "python & co": "p (all)"})
    folder.mkdir()
    write_json(folder / FRONTIER, found.to_dict())
    return found


@pytest.mark.parametrize("target", [0.02, None])
def test_a_frontier(tmp_path, target):
    folder = tmp_path / "my found"
    found = frontier(folder, target)
    page = Page(folder, out=tmp_path / "page.html")
    assert html.escape(found.verdict()) in page.body.replace("&#39;", "&#x27;")
    assert [row[0] for row in page.rows] == 2 * ["cache", "737.5 KiB", "1.4 MiB", "2.9 MiB"]
    assert [f"dofla chat '{folder}/compressed/{size}'" for size in found.kept] == page.texts("pre")[0].splitlines()
    for (title, field), name in zip(
        {"Loss increase": "loss", "KL divergence": "kl"}.items(), ("loss_increase", "kl"), strict=True
    ):
        title = f"{title} against bytes of the cache"
        assert page.values(title, field) == [getattr(x, name) for x in found.points]
        assert page.values(title, "target") == ([] if target is None else [target])


def test_words_from_outside_stay_words(copied, tmp_path):
    """A model, a continuation and a text whose names are markup, and a recipe that would end the page."""
    bad = "</script></pre><script>console.log('ran')</script><img>"
    for path in copied.rglob("evaluation.json"):
        figures = json.loads(path.read_text())
        figures["model"]["class"] = figures["samples"][0]["model"] = bad
        path.write_text(json.dumps(figures))
    (copied / "recipe.yaml").write_text((copied / "recipe.yaml").read_text() + f"# {bad}\n")
    frontier(tmp_path / "found", english=bad)
    page = Page(copied, tmp_path / "found", out=tmp_path / "page.html")
    assert "<img" not in page.body
    assert bad in page.values("KL divergence against bytes of the cache", "text")
    assert bad in page.texts("pre")[-1]
    assert html.unescape(page.body).count(bad) > 4


def test_without_altair_there_are_figures_and_one_line(llama_run, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("dofla.report.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    assert call("report", llama_run, "--out", tmp_path / "page.html") == 2
    assert capsys.readouterr().err == "dofla: a report needs altair: pip install 'dofla[report]'\n"
    run = shutil.copytree(llama_run, tmp_path / "run")
    assert call("run", run / "recipe.yaml", "--out", run) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"no report: a report needs altair: pip install 'dofla[report]', then dofla report {run}" in said
    assert not list(tmp_path.rglob("*.html"))


def test_a_run_ends_with_its_page_and_one_that_would_be_too_large_is_not_written(copied, capsys, monkeypatch):
    assert call("run", copied / "recipe.yaml", "--out", copied) == 0
    assert "report: " in capsys.readouterr().out
    path = copied / "report.html"
    before = path.read_text()
    assert call("report", copied, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == path.stat().st_size
    assert path.read_text() == before
    monkeypatch.setattr("dofla.report.page.LIMIT", 1000)
    with pytest.raises(DoflaError, match="report fewer runs"):
        write_report([copied], copied / "large.html")
    assert not (copied / "large.html").exists()


DOF = "models/dof-seed0"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: (run / "recipe.yaml").unlink(), ["no run folder", "recipe.yaml"]),
        (lambda run: shutil.rmtree(run / "models"), ["no finished model"]),
        (lambda run: (run / "recipe.yaml").write_text("model: [x"), ["recipe.yaml", "cannot be read"]),
        (lambda run: (run / DOF / "evaluation.json").write_text("{"), ["evaluation.json"]),
        (lambda run: (run / DOF / "plan.json").unlink(), ["plan.json"]),
        (lambda run: (run / DOF / "distill/losses.json").write_text("[]"), ["losses.json"]),
        (lambda run: (run / DOF / "distill/losses.json").write_text("{}"), ["dof-seed0", "'layers'"]),
        (lambda run: (run / DOF / "speed.json").write_text('{"original": 3}'), ["dof-seed0", "make it again"]),
    ],
)
def test_damage_is_one_line_that_names_the_file(copied, tmp_path, capsys, damage, words):
    damage(copied)
    error = refused(capsys, "report", copied, "--out", tmp_path / "page.html")
    for word in words:
        assert word in error
    assert not (tmp_path / "page.html").exists()
