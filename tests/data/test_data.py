"""Documents from every source, the held-out split, packed and padded windows, the model's own samples."""

import gzip
import json
import logging
import sys
import types
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM
from word_tokenizers import WORDS, word_tokenizer

from dofla import token_windows
from dofla.data import TokenWindows, read_documents
from dofla.errors import DoflaError
from dofla.integration import self_samples
from dofla.integration.self_samples import self_sample

VOCAB = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "<s>", "[CLS]", "[SEP]", *WORDS])}
BOS, CLS, SEP = VOCAB["<s>"], VOCAB["[CLS]"], VOCAB["[SEP]"]


def build_tokenizer(**special):
    tokenizer = word_tokenizer(VOCAB, "[UNK]", **special)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(bos_token="<s>", pad_token="[PAD]")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(VOCAB), "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=BOS, eos_token_id=SEP, pad_token_id=0))


def make_documents(count=200):
    """Distinct documents of 1 to 30 known words."""
    return [" ".join(WORDS[(7 * i + j * j) % 60] for j in range(1 + i % 30)) + f" w{i % 60}" for i in range(count)]


def texts_of(windows):
    """The words of each window."""
    words = {token: word for word, token in VOCAB.items() if word in WORDS}
    return [" ".join(words[token] for token in row if token in words) for row in windows.input_ids.tolist()]


def read(source, **options):
    return list(read_documents(source, **options))


# Text files


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a", "A.TXT.GZ"])
@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"\n\nw1 w2\nw3\n\nw4\n   \nw5\n\n\n", ["w1 w2\nw3", "w4", "w5"]),
        (b"w1\n\nw2\n\n\n\nw3\n\nw4\n", ["w1\n\nw2", "w3\n\nw4"]),  # two blank lines take precedence over one
        (b"\xef\xbb\xbfw1\r\n\r\nw2\r\n", ["w1", "w2"]),
    ],
)
def test_text_documents_are_separated_by_blank_lines(tmp_path, name, content, documents):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    assert read(path) == read(str(path)) == documents


@pytest.mark.parametrize("end", ["\n", " "], ids=["lines", "one line"])
def test_long_text_is_cut_without_loss(tmp_path, end):
    path = tmp_path / "a.txt"
    text = ("w1 w2 w3 " * 9 + end) * 15_000
    path.write_text(text)
    documents = read(path)
    assert len(documents) == -(-len(text) // 2**20)
    assert max(map(len, documents)) <= 2**20
    assert "".join("".join(documents).split()) == "".join(text.split())


def test_large_files_are_read_only_as_far_as_asked(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": " ".join(WORDS)}) + "\n"
    path.write_text(good * 2000 + "not JSON\n")
    assert len(token_windows(path, tokenizer, length=16, windows=10)) == 10
    assert len(list(islice(read_documents(path), 3))) == 3
    with pytest.raises(DoflaError, match="line 2001: no JSON"):
        token_windows(path, tokenizer, length=16)


# Other sources


def test_json_lines(tmp_path):
    lines = [{"text": "w1", "body": "b1"}, {"text": None, "body": "b2"}, {"text": " ", "body": "b3"}]
    content = "\n\n".join(map(json.dumps, lines)).encode()
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    assert read(plain) == read(packed) == ["w1"]
    assert read(plain, text_field="body") == ["b1", "b2", "b3"]
    plain.write_text(json.dumps({"text": "w1 \ud800 é \U0001f600"}))  # half a surrogate pair
    assert read(plain) == ["w1 ? é \U0001f600"]


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    documents = make_documents()
    table = pa.table({"text": [*documents, None], "id": range(len(documents) + 1)})
    pq.write_table(table, path, row_group_size=7)
    assert read(path) == documents
    with pytest.raises(DoflaError, match="no field 'body'; set text_field to one of: text, id"):
        read(path, text_field="body")
    with pytest.raises(DoflaError, match="'id' is a int, not text"):
        read(path, text_field="id")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DoflaError, match=r"pip install 'dofla\[data\]'"):
        read(path)


def test_lists_of_texts_and_of_files(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.jsonl"
    first.write_text("w1\n\nw2\n")
    second.write_text('{"text": "w3"}\n')
    assert read([first, second]) == read([str(first), str(second)]) == ["w1", "w2", "w3"]
    assert read(["w1\n\nw2", "", "w3"]) == ["w1\n\nw2", "w3"]
    with pytest.raises(DoflaError, match=r"nosuch\.txt': no such file"):
        read([str(first), "nosuch.txt"])


def test_datasets_from_a_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "w1"}\n{"text": "w2"}\n')
    (folder / "validation.jsonl").write_text('{"text": "w3"}\n')
    assert read(str(folder)) == read(folder) == ["w1", "w2"]
    assert read(f"{folder}@validation") == ["w3"]
    with pytest.raises(DoflaError, match="no field 'body'; set text_field to one of: text"):
        read(folder, text_field="body")
    with pytest.raises(DoflaError, match=r"corpus@nosuch: no such file, and no dataset to be had .*name:config@split"):
        read(f"{folder}@nosuch")


def test_datasets_by_name(monkeypatch):
    calls = []

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        yield {"text": "w1"}
        if name == "lost":
            raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for source in ("corpus", "org/corpus-1.0", "org/corpus:en.2024", "org/corpus:en@test"):
        assert read(source) == ["w1"]
    assert calls == [
        ("corpus", None, "train", True),
        ("org/corpus-1.0", None, "train", True),
        ("org/corpus", "en.2024", "train", True),
        ("org/corpus", "en", "test", True),
    ]
    with pytest.raises(DoflaError, match=r"^lost: .*\(no route\); check the name .*the network, or give a file$"):
        read("lost")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DoflaError, match=r"corpus: .*pip install 'dofla\[data\]'"):
        read("corpus")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8 text"),
        ("a.txt.gz", b"not gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"w1 " * 999, mtime=0)[:20], "cannot be read"),
        ("a.jsonl", b'{"text": "w1"}\n{"text"\n', "line 2: no JSON"),
        ("a.json", b'[\n{"text": "w1"}\n]', "line 1: no JSON"),
        ("a.jsonl", b'"w1"\n', "line 1 is a str; give one JSON object per line"),
        ("a.jsonl", b'{"body": "w1", "id": 3}\n', "line 1: no field 'text'; set text_field to one of: body, id"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' is a int, not text"),
        ("a.parquet", b"not parquet", "not a readable Parquet file"),
        ("a.safetensors", b"", "holds tokens, not text"),
    ],
)
def test_malformed_files(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DoflaError, match=f"(?=.*{path}).*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nosuch.txt", "'nosuch.txt': no such file"),
        ("nosuch/dir/corpus", "no such file"),
        ("A document, given by itself.\n" * 400, "a list for texts in memory"),
        ([], "empty list"),
        ([3], "a list of strings"),
        (3, "source: a int"),
    ],
)
def test_sources_that_are_none(source, message):
    with pytest.raises(DoflaError, match=message) as caught:
        read_documents(source)
    assert len(str(caught.value)) < 400


# The held-out split


def test_split_is_disjoint_complete_and_stable(tokenizer):
    documents = make_documents()
    options = {"length": 64, "holdout": 0.3, "padded": True, "text_field": "unused"}
    parts = {
        split: texts_of(token_windows(documents, tokenizer, split=split, **options))
        for split in ("train", "validation", "all")
    }
    assert parts["all"] == documents
    assert not set(parts["train"]) & set(parts["validation"])
    assert sorted(parts["train"] + parts["validation"]) == sorted(documents)
    assert 0.15 < len(parts["validation"]) / len(documents) < 0.45
    # Neither the order, the company, nor the seed of a document moves it.
    again = token_windows(documents[::-2], tokenizer, length=64, split="validation", holdout=0.3, padded=True, seed=5)
    assert set(texts_of(again)) == set(parts["validation"]) & set(documents[::-2])
    # A larger holdout only adds documents; the last line pins the hash across machines and versions.
    wider = token_windows(documents, tokenizer, length=64, split="validation", holdout=0.5, padded=True)
    assert set(parts["validation"]) < set(texts_of(wider))
    pinned = token_windows([f"w{i}" for i in range(9)], tokenizer, split="validation", holdout=0.5, padded=True)
    assert texts_of(pinned) == ["w0", "w4", "w6", "w7"]


def test_bad_arguments(tokenizer):
    for options, message in [
        ({"split": "test"}, "split: 'test'; choose train, validation or all"),
        ({"holdout": 1.0}, "holdout: 1.0"),
        ({"length": 1}, "length: 1"),
        ({"windows": 0}, "windows: 0"),
    ]:
        with pytest.raises(DoflaError, match=message):
            token_windows(["w1"], tokenizer, **options)


# Packed windows


def test_packing_reconstructs_the_text(caplog, monkeypatch):
    tokenizer = build_tokenizer(bos_token="<s>", model_max_length=8)  # fresh: it warns but once
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # so that caplog sees its warnings
    documents = make_documents()
    with caplog.at_level(logging.WARNING, logger="transformers"):
        packed = token_windows(documents, tokenizer, length=32, split="all")
    assert not caplog.records
    expected = [token for text in documents for token in [BOS, *(VOCAB[word] for word in text.split())]]
    assert packed.input_ids.flatten().tolist() == expected[: len(expected) // 32 * 32]
    assert packed.attention_mask is None
    assert packed.length == 32
    assert packed.source == "200 texts in memory (all)"
    first = token_windows(documents, tokenizer, length=32, split="all", windows=5)
    assert torch.equal(first.input_ids, packed.input_ids[:5])


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        ({"bos_token": "<s>", "eos_token": "[SEP]"}, [BOS]),
        ({"eos_token": "[SEP]"}, [SEP]),
        ({"cls_token": "[CLS]", "sep_token": "[SEP]"}, [CLS]),
        ({}, []),
    ],
)
def test_separator(special, separator):
    packed = token_windows(["w1 w2", "w3 w4"], build_tokenizer(**special), length=4, split="all")
    expected = [*separator, VOCAB["w1"], VOCAB["w2"], *separator, VOCAB["w3"], VOCAB["w4"]]
    assert packed.input_ids.tolist() == [expected[:4]]


def test_too_little_text(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("w1 w2 w3")
    with pytest.raises(DoflaError, match=r"a\.txt \(all\): 4 tokens, and one window needs 16"):
        token_windows(path, tokenizer, length=16, split="all")
    with pytest.raises(DoflaError, match=r"\(validation\): 0 tokens"):
        token_windows(path, tokenizer, length=2, split="validation", holdout=0)


# Padded windows


def test_padded_windows(tokenizer):
    short, long = "w1 w2", " ".join(WORDS[:20])
    lines = f"{long}\n\n too short\n w5 w6 w7 w8 w9 w10 w11 \n"
    result = token_windows([short, lines], tokenizer, length=12, split="all", padded=True)
    assert texts_of(result) == [short, " ".join(WORDS[:10]), "w5 w6 w7 w8 w9 w10 w11"]
    assert result.input_ids.shape == (3, 12)
    assert result.attention_mask.sum(1).tolist() == [4, 12, 9]
    assert result.input_ids[0].tolist() == [CLS, VOCAB["w1"], VOCAB["w2"], SEP] + [0] * 8
    assert result.input_ids[1, -1] == SEP
    assert token_windows([short, lines], tokenizer, split="all", padded=True, windows=1).length == 4
    with pytest.raises(DoflaError, match=r"set tokenizer\.pad_token"):
        token_windows(["w1"], build_tokenizer(), padded=True)
    with pytest.raises(DoflaError, match="no text for a window"):
        token_windows(["w1\nw2"], tokenizer, split="all", padded=True)


# Token files


def test_token_file(tmp_path, tokenizer):
    path = tmp_path / "tokens.safetensors"
    tokens = torch.arange(40 * 10).view(40, 10).to(torch.int32)
    save_file({"input_ids": tokens}, path)
    everything = token_windows(path, tokenizer, length=4, split="all")
    assert torch.equal(everything.input_ids, tokens[:, :8].reshape(80, 4).long())
    assert len(token_windows(str(path), tokenizer, length=4, windows=3)) == 3
    parts = [
        token_windows(path, tokenizer, length=10, split=split, holdout=0.4).input_ids
        for split in ("train", "validation")
    ]
    assert torch.equal(torch.cat(parts).sort(0).values, tokens.long())
    for length, holdout, message in [(11, 0.5, r"I32 \[40, 10\]"), (10, 0, "none of its 40 rows")]:
        with pytest.raises(DoflaError, match=message):
            token_windows(path, tokenizer, length=length, holdout=holdout, split="validation")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"tokens": torch.ones(2, 4, dtype=torch.int64)}, "tensors tokens; needs input_ids"),
        ({"input_ids": torch.ones(2, 4)}, r"F32 \[2, 4\]; needs integers"),
        ({"input_ids": torch.ones(4, dtype=torch.int64)}, r"I64 \[4\]; needs integers"),
        ({"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 4).long()}, "no attention_mask"),
        (None, "not a readable safetensors file"),
    ],
)
def test_malformed_token_files(tmp_path, tokenizer, tensors, message):
    path = tmp_path / "tokens.safetensors"
    path.write_bytes(b"nothing") if tensors is None else save_file(tensors, path)
    with pytest.raises(DoflaError, match=message):
        token_windows(path, tokenizer, length=4)


# The model's own samples


def test_self_samples_are_reproducible_and_leave_no_trace(model, tokenizer, monkeypatch):
    monkeypatch.setattr(self_samples, "BATCH", 4)
    model.train()
    model.model.layers[0].eval()
    settings = model.generation_config
    torch.manual_seed(1)
    state = torch.get_rng_state()
    seen, options = [], {"count": 10, "length": 12}
    samples = self_sample(model, tokenizer, **options, seed=3, progress=lambda *report: seen.append(report))
    assert seen == [(n, 36) for n in range(1, 37)]  # three batches
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.model.layers[0].training
    assert model.generation_config is settings
    model.eval()
    torch.manual_seed(2)
    again = self_sample(model, tokenizer, **options, seed=3)
    assert torch.equal(samples.input_ids, again.input_ids)
    assert samples.input_ids.shape == (10, 12)
    assert (samples.input_ids[:, 0] == BOS).all()
    assert len(torch.unique(samples.input_ids, dim=0)) == 10
    assert not torch.equal(samples.input_ids, self_sample(model, tokenizer, **options, seed=4).input_ids)


def test_self_samples_follow_the_model_not_its_chat_settings(model, tokenizer, monkeypatch):
    for name, value in {"top_k": 1, "repetition_penalty": 5.0, "max_new_tokens": 2}.items():
        monkeypatch.setattr(model.generation_config, name, value)
    samples = self_sample(model, tokenizer, count=4096, length=3).input_ids
    with torch.no_grad():
        expected = model(torch.tensor([[BOS]])).logits[0, -1].softmax(-1)
    found = torch.bincount(samples[:, 1], minlength=len(VOCAB)) / 4096
    deviation = (found - expected).abs() / (expected * (1 - expected) / 4096).sqrt()
    assert deviation.max() < 4.5


def test_self_samples_do_not_end_at_the_end_token(model, tokenizer):
    samples = self_sample(model, tokenizer, count=64, length=40).input_ids
    ended = samples[(samples[:, 5:10] == SEP).any(1)]
    assert len(ended) > 1
    assert (ended[:, 10:] != 0).float().mean() > 0.9


def test_source_self(model, tokenizer):
    def sample(**options):
        return token_windows("self", tokenizer, length=8, windows=6, model=model, **options)

    train, seen = sample(), []
    reported = sample(split="train", seed=0, progress=lambda *report: seen.append(report))
    assert torch.equal(train.input_ids, reported.input_ids)
    assert seen[-1] == (8, 8)
    assert not torch.equal(train.input_ids, sample(split="validation").input_ids)
    assert not torch.equal(train.input_ids, sample(seed=1).input_ids)
    assert train.source == "self: samples of LlamaForCausalLM (train, seed 0)"
    with pytest.raises(DoflaError, match='source "self": no model given'):
        token_windows("self", tokenizer, windows=6)
    with pytest.raises(DoflaError, match='source "self": no number of windows given'):
        token_windows("self", tokenizer, model=model)


def test_self_sample_refusals(model, tokenizer):
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    with pytest.raises(DoflaError, match="BertForMaskedLM cannot be sampled from; give a causal language model"):
        self_sample(BertForMaskedLM(config), tokenizer, count=1, length=4)
    with pytest.raises(DoflaError, match=r"set tokenizer\.bos_token"):
        self_sample(model, build_tokenizer(), count=1, length=4)
    with pytest.raises(DoflaError, match="length: 65, and LlamaForCausalLM has 64 positions"):
        self_sample(model, tokenizer, count=1, length=65)


# TokenWindows


def test_token_windows_of_what_callers_have(tokenizer):
    ids = torch.arange(12).view(3, 4)
    windows = TokenWindows.of(ids.int())
    assert windows.input_ids.dtype is torch.int64
    assert (len(windows), windows.length, windows.source) == (3, 4, "tensor")
    assert TokenWindows.of(windows) is windows
    encoded = tokenizer(["w1 w2", "w3"], padding=True, return_tensors="pt")
    of_batch = TokenWindows.of(encoded)
    assert torch.equal(of_batch.attention_mask, encoded["attention_mask"])
    assert TokenWindows.of({"input_ids": ids}).attention_mask is None


def test_batch_and_take():
    ids = torch.arange(12).view(3, 4)
    windows = TokenWindows(ids, torch.ones(3, 4, dtype=torch.bool))
    for indices in ([2, 0], torch.tensor([2, 0]), range(2, -1, -2)):
        batch = windows.batch(indices)
        assert torch.equal(batch["input_ids"], ids[[2, 0]])
        assert batch["attention_mask"].dtype is torch.int64
    first = windows.take(2)
    assert (first.input_ids.shape, first.attention_mask.shape) == ((2, 4), (2, 4))
    assert len(windows.take(9)) == 3
    assert set(TokenWindows(ids).batch([0])) == {"input_ids"}
    with pytest.raises(DoflaError, match="take: 0"):
        windows.take(0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.ones(2, 3), r"torch\.float32 values; give integers"),
        (torch.arange(3), r"shape \[3\]"),
        (torch.zeros(0, 3, dtype=torch.int64), r"shape \[0, 3\]"),
        ([[1, 2]], "a list, not a tensor"),
        ({"input_ids": [[1, 2]]}, 'return_tensors="pt"'),
        ({"labels": torch.ones(2, 3)}, "a mapping with labels; needs input_ids"),
        (
            {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 2).long()},
            r"attention_mask: shape \[2, 2\]",
        ),
    ],
)
def test_token_windows_of_anything_else(tokens, message):
    with pytest.raises(DoflaError, match=message):
        TokenWindows.of(tokens)
