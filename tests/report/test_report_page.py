"""The page in a browser: it opens without a network, and anyone can read it."""

from __future__ import annotations

import json
import math
import random
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dofla
from dofla.plans.curves import Curves, LayerCurve, Point
from dofla.plans.plan import LayerPlan, Plan
from dofla.profiles.profile import HeadStatistics, LayerProfile, Profile
from dofla.profiles.spectrum import Spectrum
from dofla.report import write_plan_page, write_profile_page, write_report
from dofla.report.html import LIMIT
from dofla.runs.frontier import FRONTIER, Frontier
from dofla.runs.frontier import Point as Judged
from dofla.storage.files import write_json

pytestmark = pytest.mark.slow

SECTIONS = ["answer", "compared", "bytes", "layers", "attention", "texts", "speed", "repeat"]  # of a run


@contextmanager
def opened(browser, path, width=1280, scheme="light"):
    """The page without a network; it may neither complain nor ask for anything."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if request.url != address else None)
    address = Path(path).resolve().as_uri()
    page.goto(address)
    try:
        yield page
        assert complaints == []
        assert not re.search(r"\b(null|undefined|NaN|Infinity)\b", page.locator("body").inner_text().split("Recipe")[0])
    finally:
        context.close()


def script(name):
    """A function that the page is asked to run."""
    return Path(__file__).with_name(f"{name}.js").read_text()


def shown(page):
    return [name for name in ["answer", "sizes", *SECTIONS[1:]] if page.locator(f"#{name}").is_visible()]


@pytest.fixture(scope="module")
def both_runs(llama_run, bert_run, tmp_path_factory):
    return write_report([llama_run, bert_run], tmp_path_factory.mktemp("both") / "report.html")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_run_ends_with_a_page_that_opens_anywhere(browser, llama_run, width, scheme):
    path = llama_run / "report.html"
    assert path.stat().st_size <= LIMIT
    with opened(browser, path, width, scheme) as page:
        assert shown(page) == SECTIONS
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
        for student in page.locator("#student option").all():
            page.locator("#student").select_option(student.get_attribute("value"))
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        for word in ("Same next token", "Cache", "Perplexity increase"):
            assert page.get_by_text(word).count()


def test_an_encoder_is_not_asked_to_write(browser, bert_run):
    with opened(browser, bert_run / "report.html") as page:
        assert shown(page) == [name for name in SECTIONS if name != "texts"]
        assert "cosine" in page.locator("#answer").inner_text()


def test_several_runs_share_a_page(browser, both_runs):
    with opened(browser, both_runs, 400) as page:
        options = page.locator("#student option").all_inner_texts()
        assert options == [
            *(f"{name} (llama-run)" for name in ("Performer", "DoF", "Measured", "Compressed", "One softmax")),
            *(f"{name} (bert-run)" for name in ("DoF", "Even")),
        ]
        assert page.locator("#compared figure").count() == 2  # a loss increase is no cosine
        page.locator("#student").select_option(label="Even (bert-run)")
        assert page.locator("#answer-title").inner_text() == "bert"
        assert "texts" not in shown(page)


def synthetic(layers=13, seed=0):
    """A profile of layers of all shapes, and error curves for it."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    profiles, measured = [], []
    for n in range(layers):
        kv_heads, head_dim, value_dim = rng.choice([(1, 16, 16), (2, 32, 32), (4, 8, 24)])
        level = rng.choice([0.05, 1, 9, 9])  # so that small budgets lift many layers to one feature
        steep = [level * rng.uniform(0.8, 1.2) for _ in range(kv_heads)]
        eigenvalues = [torch.arange(1, 65, dtype=torch.float64) ** -s for s in steep]
        noise = torch.rand(64, generator=generator, dtype=torch.float64)
        spectra = [Spectrum((values * (1 + noise)).sort(descending=True).values, 0.0) for values in eigenvalues]
        name, statistics = f"layer.{n}", [HeadStatistics() for _ in spectra]
        profiles.append(LayerProfile(name, 4, kv_heads, head_dim, value_dim, 0.2, True, spectra, statistics))
        harm, power = rng.uniform(0.01, 1), rng.uniform(0.3, 2)
        sizes = [(share, size) for share in (0.5, 0.73, 0.9) for size in (200, 900, 4_000, 20_000)]
        points = [Point(s, b, [rng.uniform(0.8, 1.2) * (b / 100) ** -power for _ in spectra]) for s, b in sizes]
        measured.append(LayerCurve(name, [harm * rng.uniform(0, 2) for _ in spectra], points))
    # Some that are equal, to be told apart by their order, and in error curves by name: layer.10 before layer.2.
    for n in (4, 7, 10):
        profiles[n] = replace(profiles[2], name=f"layer.{n}")
        measured[n] = replace(measured[2], name=f"layer.{n}")
    made_by = {"feature_map": "mlp", "token_dtype": "int8"}
    return Profile("made up", profiles, 64, 64, "none", 0), Curves(measured, "made up", made_by)


def test_the_page_of_a_plan_of_many_layers(browser, tmp_path):
    profile, curves = synthetic()
    plan = dofla.allocate(profile, 40, "measured", curves=curves)
    path = write_plan_page(profile, plan, tmp_path / "plan.html", folder="p", lam=0.01)
    with opened(browser, path) as page:
        assert shown(page) == ["answer", "bytes", "layers"]
        assert page.locator(".plan-row").count() == 13
        assert page.locator("#plan-sum strong").inner_text() == f"{plan.state_bytes() / 1024:.1f} KiB per sequence"
        page.locator("#plan svg[tabindex]").focus()
        page.keyboard.press("ArrowDown")
        assert re.search(r"Layer 1, KV head 0: .* degrees of freedom", page.locator("#said").inner_text())


def test_the_page_of_a_profile_alone(browser, tmp_path):
    profile, _ = synthetic()
    with opened(browser, write_profile_page(profile, tmp_path / "p.html", folder="my folder", lam=0.5)) as page:
        assert shown(page) == ["answer", "bytes"]
        assert "λ = 0.500" in page.locator("#bytes .legend").first.inner_text()
        assert page.locator(".plan-row").count() == 0


def test_bytes_of_a_compressed_cache_are_shown_by_kv_head(browser, llama_run):
    plan = Plan.load(llama_run / "students" / "compressed-seed0")
    with opened(browser, llama_run / "report.html") as page:
        page.locator("#student").select_option(label="Compressed")
        part = page.locator("#bytes")
        assert "degrees of freedom" not in part.inner_text().lower()
        data = json.loads(page.locator("#data").inner_text())
        (student,) = [x for x in data["runs"][0]["students"] if x["name"] == "Compressed"]
        for layer, found in zip(plan.layers, student["layers"], strict=True):
            assert len(found["heads"]) == layer.kv_heads
            assert sum(found["heads"]) == layer.state_bytes(4) == found["bytes"]
        page.locator("#student").select_option(label="Measured")
        assert "degrees of freedom" in part.inner_text().lower()


def test_models_of_equal_bytes_are_compared_by_bars(browser, llama_run, tmp_path):
    path, shape = llama_run / "report.html", re.compile(r'"state_bytes":\d+,"kept_bytes":\d+')
    alike = tmp_path / "alike.html"
    alike.write_text(shape.sub('"state_bytes":1024,"kept_bytes":0', path.read_text()))
    with opened(browser, alike, 400) as page:
        bars = page.locator("#compared .bars.compared")
        assert bars.locator(".track").count() == 5
        data = json.loads(page.locator("#data").inner_text())["runs"][0]["students"]
        order = sorted(data, key=lambda student: student["lost"])
        names = [student["name"] for student in order]
        assert bars.locator(".row > :first-child").all_inner_texts() == names
        assert page.locator("#compared svg").count() == 0


def test_only_what_was_measured_is_claimed(browser, llama_run):
    with opened(browser, llama_run / "report.html") as page:
        # Words are asked for that the tokenizer does not have, and no tasks.
        assert page.locator(".unchecked").inner_text() == "Not checked: tasks, recall."
        assert "perplexity" in page.locator("#verdict").inner_text()


def test_a_compressed_model(browser, llama_run):
    plan = Plan.load(llama_run / "students" / "compressed-seed0").layers[0]
    ((_, bits),) = plan.coded_per_head[0]
    _, window, sinks = ("–".join(map(str, sorted(set(sizes)))) for sizes in zip(*plan.sizes, strict=True))
    tokens = "–".join(map(str, sorted({count for ((count, _),) in plan.coded_per_head})))
    bits = f"{bits:g} bits"
    with opened(browser, llama_run / "report.html") as page:
        page.locator("#student").select_option(label="Compressed")
        layers = page.locator("#layers")
        lead = layers.locator(".lead").inner_text()
        assert "Tokens that leave the window are kept in fewer bits." in lead
        assert "the heavy hitters stay: those that draw most attention." in lead
        assert "Older tokens are evicted." in lead
        row = layers.locator("tbody tr").first.locator("td")
        assert row.all_inner_texts()[:5] == ["0", "none", window, f"{tokens} @ {bits}", sinks]
        assert layers.locator(".legend").first.inner_text().split("\n")[1:] == [bits, "window and sinks"]
        row.nth(6).hover()
        (coded,) = plan.bytes_by_kind(4)[2].values()
        assert page.locator("#tip").inner_text().startswith(f"{coded} B in {bits}, ")
        # It sees nothing of the far past, so KL says nothing of its error.
        assert "what the layer’s attention gives" in layers.locator(".legend").last.inner_text()
        assert "∞" not in layers.locator("table").inner_text()
        assert "There are no features, and nothing was trained: the codes of its tiers" in layers.inner_text()
        page.locator("select#layer").select_option(index=0)
        page.locator("select#head").select_option(index=0)
        _, window, sinks = plan.sizes[0]
        newest = 31 - window  # that the query in row 31 sees in the tier
        for column, words in ((newest, bits), (newest + 1, None), (sinks - 1, None)):
            page.locator("#attention canvas").nth(1).evaluate(
                "(map, [x, y]) => { const r = map.getBoundingClientRect(), s = r.width / map.width;"
                " map.dispatchEvent(new PointerEvent('pointermove',"
                " {clientX: r.x + (x + 0.5) * s, clientY: r.y + (y + 0.5) * s})); }",
                [column, 31],
            )
            readout = page.locator("#attention .readout").last.inner_text()
            assert (f"holds it in {words}" in readout) if words else ("holds it" not in readout)
        assert "Dotted: where a tier ends" in page.locator("#attention").inner_text()


def test_heads_with_tiers_of_their_own(browser, tmp_path):
    profile, _ = synthetic()
    heads = [layer.kv_heads for layer in profile.layers]
    assert set(heads) == {1, 2, 4}
    layers = []
    for layer in profile.layers:
        ragged = [[[20, 4], [50, 3]], [[10, 4], [70, 3]], [[30, 2.5]], [[30, 2.5]]][: layer.kv_heads]
        sizes = {"features": 3, "window": 4, "sinks": 1, "feature_map": "mlp", "token_dtype": "int8"}
        layers.append(LayerPlan(layer.name, layer.kv_heads, layer.head_dim, layer.value_dim, **sizes, tiers=ragged))
    plan = Plan(layers, "made up", {"strategy": "by hand", "budget": 20})
    path = write_plan_page(profile, plan, tmp_path / "plan.html", folder="p", lam=0.01)
    with opened(browser, path, 900) as page:
        words = {
            1: ("20 @ 4 bits, 50 @ 3 bits", ""),
            2: ("10–20 @ 4 bits, 50–70 @ 3 bits", "head 0: 20 @ 4 bits, 50 @ 3 bits\nhead 1: 10 @ 4 bits, 70 @ 3 bits"),
            4: (
                "30–80 @ 2.5–4 bits",
                "head 0: 20 @ 4 bits, 50 @ 3 bits\nhead 1: 10 @ 4 bits, 70 @ 3 bits\nheads 2, 3: 30 @ 2.5 bits",
            ),
        }
        for row, count in zip(page.locator("#layers tbody tr").all(), heads, strict=True):
            cell = row.locator("td").nth(3)
            cell.hover()
            tip = page.locator("#tip")
            assert (cell.inner_text(), tip.inner_text() if tip.is_visible() else "") == words[count]
        kinds = ["features", "2.5 bits", "3 bits", "4 bits", "window and sinks"]
        assert page.locator("#layers .legend").inner_text().split("\n")[1:] == kinds
        assert (
            "pass through tiers, each with fewer bits than the one before" in page.locator("#layers .lead").inner_text()
        )
        assert "Features sum up older tokens." in page.locator("#layers .lead").inner_text()


def test_keys_reach_everything(browser, llama_run):
    with opened(browser, llama_run / "report.html") as page:
        page.keyboard.press("Tab")
        assert page.locator(":focus").get_attribute("class") == "skip"
        page.locator("#plan svg[tabindex]").focus()
        page.keyboard.press("ArrowDown")
        assert re.search(r"Layer 1, KV head 0: ", page.locator("#said").inner_text())
        page.locator("#texts figure svg[tabindex]").first.focus()
        page.keyboard.press("ArrowRight")
        assert "position in the text" in page.locator("#texts .readout").first.inner_text()
        page.locator("#theme").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_attention_is_read_out_as_it_was_kept(browser, llama_run):
    with opened(browser, llama_run / "report.html") as page:
        page.locator("#student").select_option(label="Measured")
        page.locator("#layer").select_option("1")
        page.locator("#head").select_option("2")
        page.locator("#attention .strip button").nth(20).click()
        readout = page.locator("#attention .readout").last.inner_text()
        row, column = map(int, re.findall(r"\((\d+)\)", readout))
        assert row == 20
        said = [float(share) for share in re.findall(r"([\d.]+) %", readout)]
        kept = page.evaluate(script("level"), ["model.layers.1.self_attn", 2, row, column])
        assert said == pytest.approx([100 * share for share in kept], abs=0.051)


def test_all_words_stand_out_from_what_is_behind_them(browser, llama_run):
    with opened(browser, llama_run / "report.html") as page:
        page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
        page.locator("#student").select_option(label="Measured")
        page.locator("#attention .strip button").nth(30).click()
        for scheme in ("light", "dark"):
            assert page.evaluate("document.documentElement.dataset.theme") == scheme
            found = page.evaluate(script("contrast"))
            assert found["seen"] > 200
            assert found["poor"] == []
            page.locator("#theme").click()


def test_words_from_outside_stay_words(browser, llama_run, tmp_path):
    """A model whose name is markup, and a recipe that would end the script."""
    folder = tmp_path / "run"
    for path in sorted(llama_run.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(llama_run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    bad = "</script><script>console.log('ran')</script><img src=x onerror=console.log('ran')>"
    for path in folder.rglob("evaluation.json"):
        figures = json.loads(path.read_text())
        figures["model"]["class"] = bad
        path.write_text(json.dumps(figures))
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + f"# {bad}\n")
    with opened(browser, write_report([folder], tmp_path / "report.html")) as page:
        assert bad in page.locator("#answer").inner_text()
        assert bad in page.locator("#repeat pre").inner_text()


def sizes(folder, target=0.02):
    """What dofla frontier writes, of two texts and two lengths."""
    points = []
    for text, scale in (("english", 1), ("python & co", 1.5)):
        for length, low in ((512, 0.01), (2048, 0.03)):
            for budget in (32, 64, 128):
                gap = scale * low * (64 / budget) ** 1.2
                interval = [gap - 0.004, gap + 0.006]
                points.append(Judged(budget, 23_600 * budget, text, length, gap, interval, 1.1 * gap))
    model = {"class": "LlamaForCausalLM", "name": "somewhere/small", "parameters": 135_000_000}
    made = {"source": "books (train)", "length": 512, "windows": 12}
    cache = {512: 11_796_480, 2048: 47_185_920}
    found = Frontier(points, cache, target, model, made, {"english": "e (all)", "python & co": "p (all)"})
    folder.mkdir()
    write_json(folder / FRONTIER, found.to_dict())
    return found


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_how_many_bytes_it_needs(browser, tmp_path, width, scheme):
    folder = tmp_path / "my found"
    found = sizes(folder)
    with opened(browser, write_report([folder], tmp_path / "report.html"), width, scheme) as page:
        assert shown(page) == ["answer", "sizes"]
        assert page.locator("#answer-title").inner_text() == "small"
        page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#verdict").inner_text().replace("\xa0", " ") == found.verdict()
        part = page.locator("#sizes")
        lines = ["loss increase, 512 tokens", "KL, 512 tokens", "loss increase, 2,048 tokens", "KL, 2,048 tokens"]
        lines += ["target 0.02", "original’s cache, 512 tokens", "original’s cache, 2,048 tokens"]
        assert part.locator("figure .legend").inner_text().split("\n") == lines
        rows = [row.locator("td").all_inner_texts() for row in part.locator("table").first.locator("tr").all()[1:]]
        met = found.smallest(512)
        (bold,) = [row for row in rows if row[:2] == ["512", "1.4 MiB"]]
        perplexity = f"+{100 * math.expm1(met.loss_increase):.2f} %"
        assert bold == ["512", "1.4 MiB", "7.8 ×", f"{met.loss_increase:.3f}", perplexity, f"{met.kl:.3f}"]
        assert part.locator("b").all_inner_texts() == bold
        command = f"dofla chat '{folder}/compressed/64'"
        assert part.locator(".command code").all_inner_texts() == [command]
        assert part.locator("table").nth(1).locator("tr").count() == 1 + len(found.points)
        assert page.evaluate(script("contrast"))["poor"] == []


def test_the_target_stands_where_the_gap_is(browser, tmp_path):
    """The rule crosses the line of the KL between the sizes that miss the target and those that meet it."""
    sizes(tmp_path / "found")
    with opened(browser, write_report([tmp_path / "found"], tmp_path / "report.html")) as page:
        picture = page.locator("#sizes figure svg[role=img]")
        rule = float(picture.locator("line[stroke-dasharray='2 3']").first.get_attribute("y1"))
        dashed = picture.locator("polyline[stroke-dasharray]").first.get_attribute("points")
        heights = [float(point.split(",")[1]) for point in dashed.split()]
        assert [height >= rule for height in heights] == [False, True, True]  # .038, .0165 and .007


def test_without_a_target_both_ends_are_said(browser, tmp_path):
    sizes(tmp_path / "found", target=None)
    with opened(browser, write_report([tmp_path / "found"], tmp_path / "report.html")) as page:
        said = page.locator("#verdict").inner_text().replace("\xa0", " ")
        assert said.startswith("At 512 tokens, 737.5 KiB (15.6 x smaller than the original's cache): perplexity")
        assert page.locator("#sizes .command").count() == 0
        assert page.locator("#sizes b").count() == 0


def test_a_single_size_has_no_chart(browser, tmp_path):
    found = sizes(tmp_path / "found")
    one = replace(found, points=[x for x in found.points if x.size == 64])
    write_json(tmp_path / "found" / FRONTIER, one.to_dict())
    with opened(browser, write_report([tmp_path / "found"], tmp_path / "report.html")) as page:
        assert page.locator("#sizes figure").count() == 0
        assert "It is the smallest size tried" in page.locator("#verdict").inner_text()


def test_sizes_beside_a_run(browser, llama_run, tmp_path):
    sizes(tmp_path / "found")
    with opened(browser, write_report([llama_run, tmp_path / "found"], tmp_path / "report.html")) as page:
        assert shown(page) == ["answer", "sizes", *SECTIONS[1:]]
        assert page.locator("#nav a").all_inner_texts()[:2] == ["Answer", "Sizes"]
