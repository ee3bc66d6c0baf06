"""The documentation: its Python runs and prints what it shows, its commands and recipes are ones that dofla takes."""

import contextlib
import gzip
import io
import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml
from benches import scripts
from transformers import AutoTokenizer

import dofla
from dofla.attention import naive_cache
from dofla.cli import app
from dofla.cli.settings import Settings
from dofla.data import read_documents
from dofla.runs import RECIPES
from dofla.runs.demo import model_path
from dofla.runs.recipe import Recipe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
QUICKSTART, TUTORIAL = DOCS / "quickstart.md", DOCS / "linear-attention" / "tutorial.md"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
DOFLA = sorted((DOCS / "linear-attention").glob("*.md"))
NAIVE = DOCS / "maths" / "naive-cache.md"
RUN = [ROOT / "README.md", DOCS / "index.md", DOCS / "size.md", DOCS / "paper" / "index.md", NAIVE, *GUIDES, *DOFLA]
RUN.remove(TUTORIAL)
MADE = ("api", "students", "tables")  # by mkdocstrings and by commands
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.relative_to(DOCS).parts[0] not in MADE]
PAGES += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SIZES, SMALL = "WINDOWS, LENGTH, FIT, STEPS, WHOLE = 64, 512, 20, 150, 20", (8, 32, 1, 2, 1)

_FENCE = re.compile(r"^(?P<before>.*)\n```(?P<kind>\S.*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass
class Block:
    """A fenced block: its language, its text, the line it begins in, and what stands in the line above the fence."""

    kind: str
    text: str
    line: int
    before: str

    @property
    def is_run(self) -> bool:
        return self.kind == "python" and not self.before.startswith("<!-- not run:")


def blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    found = _FENCE.finditer(content)
    return [Block(x["kind"], x["text"], content.count("\n", 0, x.start("text")), x["before"]) for x in found]


def run(page: Path, found: list[Block]) -> list[str]:
    """Carry out the Python blocks in order, in one namespace; what each prints."""
    names: dict = {"__name__": "docs"}
    printed = []
    for block in found:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
        printed.append(out.getvalue())
    return printed


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


# The quickstart and the tutorial: what a block prints stands in the block below it


def printed_below(page: Path, found: list[Block]) -> list[tuple[Block, str]]:
    """The blocks that show what the one above prints, and what it has printed."""
    code = [block for block in found if block.is_run]
    below = {id(a): b for a, b in itertools.pairwise(found) if "text" in b.kind}
    shown = [(below.get(id(block)), text) for block, text in zip(code, run(page, code), strict=True)]
    assert not [text for block, text in shown if block is None and text], "something is printed and not shown"
    return [(block, text) for block, text in shown if block is not None]


def tutorial(small: bool) -> list[tuple[Block, str]]:
    found = blocks(TUTORIAL)
    assert found[0].text == f"{SIZES}\n"
    if small:
        found[0].text = f"{SIZES.partition('=')[0]}= {SMALL}\n"
    return printed_below(TUTORIAL, found)


@pytest.mark.slow
@pytest.mark.parametrize("page", [QUICKSTART, TUTORIAL], ids=name)
def test_a_page_runs_and_prints_what_it_shows_but_for_the_numbers(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, printed in tutorial(small=True) if page == TUTORIAL else printed_below(page, blocks(page)):
        check_words(printed, block)


@pytest.mark.long
def test_the_tutorial_prints_the_numbers_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, printed in tutorial(small=False):
        check_words(printed, block)
        if "varies" not in block.kind:
            for found, shown in zip(_NUMBER.findall(printed), _NUMBER.findall(block.text), strict=True):
                assert is_close(found, shown), f"{found} is printed where {shown} is shown:\n{printed}"


def check_words(printed: str, shown: Block) -> None:
    """See that all but numbers is the same; of what depends on the sizes, that there is something."""
    if "varies" in shown.kind:
        assert printed
        assert shown.text
    else:
        assert skeleton(printed) == skeleton(shown.text)


def skeleton(text: str) -> list[str]:
    return _NUMBER.sub("0", text).split()


def is_close(found: str, shown: str) -> bool:
    """Within a fifth, or two of the last digit: kernels differ a little between machines, and training widens that."""
    a, b = (float(number.replace(",", "")) for number in (found, shown))
    return abs(a - b) <= max(abs(b) / 5, 2 * 10.0 ** -len(shown.partition(".")[2]))


# Other pages, on models and texts of the names they use


@pytest.fixture(scope="module")
def desk(tiny, tmp_path_factory) -> Path:
    """A folder with ``my-model``, ``my-encoder``, a student of the first, and texts."""
    folder, tokenizer = tmp_path_factory.mktemp("desk"), AutoTokenizer.from_pretrained(model_path())
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    models = {"my-model": tiny.llama(**sizes), "my-encoder": tiny.bert(**sizes)}
    for place, model in models.items():
        model.save_pretrained(folder / place)
        tokenizer.save_pretrained(folder / place)
    dofla.linear.linearize(models["my-model"], budget=8).save_pretrained(folder / "student")
    tokenizer.save_pretrained(folder / "student")
    documents = list(itertools.islice(read_documents("sample"), 80))
    with gzip.open(folder / "my_text.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(documents))
    (folder / "book.txt").write_text(documents[0], encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if any(block.is_run for block in blocks(page))], ids=name)
def test_the_python_of_a_page_runs(page, desk, tmp_path, monkeypatch):
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run(page, [block for block in blocks(page) if block.is_run])


def test_the_program_of_the_maths_prints_what_its_comments_say():
    page = DOCS / "maths" / "compressed-cache.md"
    (block,) = [block for block in blocks(page) if block.is_run]
    said = re.findall(r"^print.*# (.+)$", block.text, re.MULTILINE)
    assert run(page, [block])[0].splitlines() == said


def test_the_excerpts_of_the_readable_cache_stand_in_its_file():
    lines = [line.strip() for line in Path(naive_cache.__file__).read_text(encoding="utf-8").splitlines()]
    for block in blocks(NAIVE):
        if block.kind == "py":
            excerpt = [line.strip() for line in block.text.splitlines()]
            assert any(lines[n : n + len(excerpt)] == excerpt for n in range(len(lines))), block.text


# Commands and recipes on any page


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the shell blocks of a page."""
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    yield words


def of_dofla(words: list[str]) -> list[str] | None:
    """What follows ``dofla`` in a command, or ``-m dofla``; None if it is another command."""
    if words[0] == "dofla":
        return words[1:]
    where = next((n for n, pair in enumerate(itertools.pairwise(words)) if pair == ("-m", "dofla")), None)
    return None if where is None else words[where + 2 :]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_are_ones_that_dofla_takes(page):
    parser = typer.main.get_command(app)
    fields = {name: getattr(verb.callback, "fields", None) for name, verb in parser.commands.items()}
    for verb in parser.commands.values():
        verb.callback = lambda **_: None
        for param in verb.params:
            param.callback = None  # which looks for the files that are named
    for words in commands(page):
        if (given := of_dofla(words)) is not None:
            parser.main(list(given), standalone_mode=False)  # raises what is wrong with an option
            changes = [value for option, value in itertools.pairwise(given) if option == "--set"]
            if isinstance(fields[given[0]], Settings):
                fields[given[0]].read(changes, lambda *_: None)
            if given[0] == "run":
                recipe = next((p for p in (RECIPES / f"{given[1]}.yaml", ROOT / given[1]) if p.is_file()), None)
                if recipe is not None:
                    Recipe.load(recipe, changes)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_files_extras_and_targets_a_page_names_are_there(page):
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    known = re.findall(r"^(\w+) = ", extras, re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        for word in words:
            if word.partition("/")[0] in ("examples", "benchmarks", "scripts", "tests"):
                assert (ROOT / word).exists(), f"{page.name}: {word}"
        if words[0] == "make":
            assert words[1] in targets, page.name
    for wanted in re.findall(r"(?:dofla|\.)\[([\w,]+)\]", page.read_text(encoding="utf-8")):
        assert set(wanted.split(",")) <= set(known), page.name


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind == "yaml" for b in blocks(p))], ids=name)
def test_the_recipes_of_a_page_are_ones_that_dofla_takes(page):
    for block in blocks(page):
        if block.kind == "yaml":
            Recipe.from_dict(yaml.safe_load(block.text), name(page))


def test_the_api_pages_have_all_that_dofla_exports():
    anchors = {x for page in (DOCS / "api").glob("*.md") for x in re.findall(r"\{#(\S+)\}", page.read_text())}
    names = {f"dofla.{name}" for name in dofla.__all__} | {f"dofla.serving.{name}" for name in dofla.serving.__all__}
    assert names - {"dofla.serving"} <= anchors


@pytest.mark.parametrize(
    ("rows", "page"),
    [("peers/continuation-2048", "comparison"), ("quality/by-size", "quality"), ("speed/decode", "decode")],
)
def test_the_plots_of_the_results_are_those_of_their_rows(rows, page, tmp_path, monkeypatch):
    drawn = tmp_path / "drawn.svg"
    monkeypatch.setattr(sys, "argv", ["plot.py", str(ROOT / "benchmarks" / f"{rows}.json"), "--out", str(drawn)])
    with scripts("", "plot") as (plot,):
        plot.main()
    assert drawn.read_text(encoding="utf-8") == (DOCS / "results" / f"{page}.svg").read_text(encoding="utf-8")
