"""The record of a student: what is in it for each kind of model, and what it leaves behind."""

import json
import re
from dataclasses import asdict, replace
from textwrap import dedent

import pytest
import torch
from sizes import compress
from students import keep_softmax, student_of

import dofla
from dofla.data import TokenWindows
from dofla.display import as_html, figure
from dofla.distillation.fidelity import attention_fidelity
from dofla.errors import DoflaError
from dofla.evaluation.language import next_token_figures
from dofla.evaluation.run import Evaluation
from dofla.evaluation.samples import beginnings
from dofla.integration.converted import Converted

LENGTH = 16
BEFORE = ("model", "source", "windows")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_language_model_is_compared_token_by_token_and_layer_by_layer(tiny, kind):
    student, windows = student_of(tiny, kind), TokenWindows(tiny.tokens(4, LENGTH), source="some text")
    figures = dofla.evaluate(student, windows, batch_size=2, seed=3)
    language, layers = next_token_figures(student, windows, batch_size=2, seed=3), figures.layers
    assert {name: getattr(figures, name) for name in language} == language
    assert layers == attention_fidelity(Converted.of(student), windows, batch_size=2, seed=3)
    assert figures.cosine is None
    assert (figures.source, figures.windows, figures.length) == ("some text", 4, LENGTH)
    assert figures.model["class"] == type(student).__name__
    data = figures.to_dict()
    assert list(data) == [*BEFORE, "language", "layers", "length", "softmax_bytes", "state_bytes", "strategy"]
    assert (data["language"], data["layers"]) == (language, {name: asdict(layer) for name, layer in layers.items()})
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_an_encoder_is_compared_by_its_embeddings(tiny, kind):
    data = tiny.padded(6, LENGTH) if kind == "bert" else tiny.images(6)
    student = student_of(tiny, kind)
    figures = dofla.evaluate(student, data, batch_size=3)
    assert figures.loss_increase is None
    assert len(figures.layers) == 2
    assert (figures.softmax_bytes is None) == (kind == "vit")
    data, sizes = figures.to_dict(), ["length", "softmax_bytes"] if kind == "bert" else []
    assert list(data) == [*BEFORE, "embeddings", "layers", *sizes, "state_bytes", "strategy"]
    assert data["embeddings"] == {"cosine": figures.cosine, "spearman": figures.spearman}
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize("kind", ["llama", "bert", "vit"])
def test_the_figures_are_shown_as_tables(tiny, kind):
    data = tiny.images(6) if kind == "vit" else tiny.padded(6, LENGTH)
    figures = dofla.evaluate(student_of(tiny, kind), data, batch_size=3)
    short, text, page = str(figures), figures.table(layers=True), as_html(figures.parts(layers=True))
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(short)
    assert page.startswith(figures._repr_html_())
    name = "loss increase, nats per token" if kind == "llama" else "cosine of embeddings"
    value = figures.loss_increase if kind == "llama" else figures.cosine
    assert re.search(rf"^{name} +{re.escape(figure(value))}", short, re.M)
    for layer, found in figures.layers.items():
        assert layer not in short
        assert re.search(rf"^{re.escape(layer)} +{figure(found.output_error)} +{figure(found.kl)}$", text, re.M)
        assert f"{layer}</td>" in page
    assert page.count("<table>") == page.count("</table>") == (3 if kind == "llama" else 2)


def test_what_a_person_decides_by_fits_a_screen():
    shown = str(evaluation([0.0021, 0.0045]))
    assert shown == dedent("""\
        48 windows of 512 tokens: stories

                              original  compressed
        loss, nats per token      2.00        2.00
        perplexity                7.39        7.41
        cache at 512 tokens    2.0 MiB   136.0 KiB  15.1 x smaller

        loss increase, nats per token  0.00300 (95 % interval 0.00210 to 0.00450)
        perplexity increase            +0.300 % (+0.210 % to +0.451 %)
        KL divergence, nats per token  0.00400
        same likeliest token           97.6 %

        Close to the original: perplexity +0.300 %, cache 15.1 x smaller at 512 tokens.""")


@pytest.mark.parametrize(
    ("interval", "state", "words"),
    [
        ([-0.058, -0.027], 136, "predicts this text better than the original: the text is unlike the original's"),
        ([0.1, 0.2], 136, "Worse than the original: perplexity +16.2 %, cache 15.1 x smaller"),
        ([4.0, 6.0], 136, "Far from the original: perplexity x 148, cache 15.1 x smaller"),
        ([0.0, 0.01], 4096, "Close to the original: perplexity +0.501 %, cache 2.00 x larger at 512 tokens."),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_bytes(interval, state, words):
    assert words in " ".join(str(evaluation(interval, state)).split())


def test_without_an_interval_none_is_shown_and_the_verdict_says_so():
    text = str(replace(evaluation([0.0021, 0.0045]), loss_increase_interval=None))
    assert re.search("loss increase, nats per token +0.00300\n", text)
    assert re.search("perplexity increase +[+]0.300 %\n", text)
    verdict = "Close to the original: perplexity +0.300 %, cache 15.1 x smaller at 512 tokens. So few windows have no"
    assert verdict in " ".join(text.split())


def evaluation(interval, state=136):
    increase = sum(interval) / 2 if interval != [0.0021, 0.0045] else 0.003
    return Evaluation(
        *({}, "stories", 48, {}, state * 1024, "compressed", 512, 2048 * 1024, 100),
        original_loss=2.0,
        loss=2.0 + increase,
        loss_increase=increase,
        loss_increase_interval=interval,
        kl=0.004,
        top1_agreement=0.976,
    )


def test_attention_that_lets_tokens_go_has_no_column_of_infinities(tiny):
    model = compress(tiny.llama(), tiny.tokens(2, 48), tokens=8, head_budgets="even")
    figures = dofla.evaluate(model, tiny.tokens(2, 128), batch_size=2)
    text = figures.table(layers=True)
    assert "∞" not in text
    assert "attention KL" not in text
    error = figures.layers["model.layers.0.self_attn"].output_error
    assert re.search(rf"^model\.layers\.0\.self_attn +{figure(error)}$", text, re.M)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_progress_is_that_of_all_batches(tiny, kind):
    seen, options = [], {"batch_size": 2, "fidelity_windows": 3}
    dofla.evaluate(student_of(tiny, kind), tiny.padded(5, LENGTH), **options, progress=lambda *x: seen.append(x))
    assert seen == [(n, 5) for n in range(1, 6)]


def test_state_bytes_are_the_plans_beside_those_of_the_cache_it_replaces(tiny):
    model = tiny.llama()
    plan = tiny.plan(model, features=[6, 4], window=2, sinks=1)
    keep_softmax(plan, 1)
    plan.made_by = {"strategy": "by hand"}
    dofla.linear.linearize(model, plan)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        figures = dofla.evaluate(model.to(dtype), tiny.tokens(2, LENGTH))
        one_cache = LENGTH * 2 * (8 + 8) * size
        assert figures.softmax_bytes == 2 * one_cache
        assert figures.state_bytes == (6 + 4) * (8 + 2) * 4 + 3 * 2 * (8 + 8) * size + one_cache
    assert figures.strategy == "by hand"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_student_is_left_as_it_was(tiny, kind):
    student, tokens = student_of(tiny, kind), tiny.tokens(4, LENGTH)
    student.train()
    student.base_model.get_submodule("layers.0" if kind == "llama" else "encoder.layer.0").eval()
    modes = {name: module.training for name, module in student.named_modules()}
    weights = {key: value.clone() for key, value in student.state_dict().items()}
    dofla.evaluate(student, tokens)
    assert {name: module.training for name, module in student.named_modules()} == modes
    assert all(torch.equal(value, weights[key]) for key, value in student.state_dict().items())
    assert all(p.grad is None for p in student.parameters())
    assert torch.is_grad_enabled()
    with torch.no_grad():
        ours = student.eval()(tokens)[0]
        with dofla.original(student):
            assert not torch.allclose(student(tokens)[0], ours)


def test_dropout_plays_no_part(tiny):
    model, tokens = tiny.gpt2(attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), tiny.tokens(3, LENGTH)
    dofla.linear.linearize(model, tiny.plan(model))
    assert dofla.evaluate(model.train(), tokens) == dofla.evaluate(model.eval(), tokens)


def test_what_cannot_be_evaluated_is_refused(tiny):
    tokens = tiny.tokens(2, LENGTH)
    with pytest.raises(DoflaError, match="not converted"):
        dofla.evaluate(tiny.llama(), tokens)
    for kind in ("llama", "bert"):
        with pytest.raises(DoflaError, match="batch_size is 0"):
            dofla.evaluate(student_of(tiny, kind), tokens, batch_size=0)


# --- prompts that are continued for people to read --------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are bytes, of which 0 separates documents."""

    all_special_ids = (0,)

    def decode(self, ids):
        return bytes(ids).decode()


def windows(text):
    return TokenWindows(torch.tensor([[0 if letter == "|" else ord(letter) for letter in text]]))


def test_prompts_begin_with_a_document_or_a_sentence():
    for text, expected in (
        ("of it.|Once upon a.", "|Once"),
        ("of it. Once upon a.", " Once"),
        ("no ends here at all", "no en"),
    ):
        ((ids, new),) = beginnings(windows(text), Letters(), prompts=3, prompt_tokens=5, new_tokens=7)
        assert ("".join(chr(i) if i else "|" for i in ids.tolist()), new) == (expected, 7)
    ((ids, _),) = beginnings(windows("of it. Once"), Letters(), prompts=1, prompt_tokens=50, new_tokens=7)
    assert len(ids) == 11
