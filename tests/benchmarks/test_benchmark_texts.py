"""The texts of the benchmarks: which documents of a dataset are taken, and files that one has already."""

import gzip
from collections import Counter

import datasets
import pytest
from benches import scripts

import dofla

DOCUMENTS = 5000
SIZES = {"english": 3000, "stories": 1000, "books": 1000}


@pytest.fixture
def data(monkeypatch, tmp_path):
    """benchmarks/data.py with small files, from a hub whose documents say where they stand."""
    asked = []

    def load_dataset(name, config=None, *, split, streaming):
        assert streaming
        asked.append((name, config, split))
        field = "article" if config else "text"
        for n in range(DOCUMENTS):
            yield {field: f"{name} {split} {n}<br /><br />second\n\n\n \nthird\n", "other": n}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    with scripts("", "data") as (module,):
        files = {name: (SIZES[name.partition("-")[0]], parts) for name, (_, parts) in module.FILES.items()}
        monkeypatch.setattr(module, "FILES", files)
        module.asked = asked
        yield module


def read(path):
    return gzip.decompress(path.read_bytes()).decode()


def test_each_file_has_its_size_and_its_kinds_in_equal_parts(data, tmp_path):
    data.main(None, tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted(f"{x}.txt.gz" for x in data.FILES)
    documents = read(tmp_path / "data" / "english-train.txt.gz").split("\n\n\n")
    assert sum(map(len, documents)) == 3000
    characters = Counter()
    for text in documents[:-1]:  # the last one is cut
        characters[text.split()[0]] += len(text)
    assert characters.keys() == {"stanfordnlp/imdb", "abisee/cnn_dailymail", "emozilla/pg19"}
    assert max(characters.values()) - min(characters.values()) <= max(map(len, documents))
    assert documents[0] == "stanfordnlp/imdb train 0\n\nsecond\n\nthird"
    assert [text.split()[2] for text in documents if text.startswith("stanford")][:3] == ["0", "4", "8"]
    assert [text.split()[2] for text in documents if text.startswith("emozilla")][:3] == ["50", "51", "52"]
    assert len(list(dofla.data.read_documents(tmp_path / "data" / "books-val.txt.gz"))) > 1
    # Train and validation come from other splits.
    assert not set(documents) & set(read(tmp_path / "data" / "english-val.txt.gz").split("\n\n\n"))
    assert {split for _, _, split in data.asked} == {"train", "validation", "test"}
    data.main(None, tmp_path / "again")
    for path in (tmp_path / "data").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_files_that_one_has_are_copied_and_those_that_are_there_stay(data, tmp_path, capsys):
    mine, out = tmp_path / "mine", tmp_path / "data"
    mine.mkdir()
    out.mkdir()
    for name in data.FILES:
        (mine / f"{name}.txt.gz").write_bytes(name.encode())
    (mine / "stories-val.txt.gz").unlink()
    (out / "books-val.txt.gz").write_bytes(b"older")
    data.main(mine, out)
    assert data.asked == [("roneneldan/TinyStories", None, "validation")]
    assert (out / "books-val.txt.gz").read_bytes() == b"older"
    assert (out / "english-val.txt.gz").read_bytes() == b"english-val"
    assert "books-val.txt.gz: is there" in capsys.readouterr().out


def test_a_long_document_gives_its_middle_and_a_split_that_ends_before_is_named(data, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([{"text": "a" * 50 + "b" * 20 + "c" * 50}]))
    assert list(data.Part("books", "train", longest=20).documents()) == ["b" * 20]
    with pytest.raises(dofla.DoflaError, match="roneneldan/TinyStories has too few texts in train"):
        list(data.selected(*data.FILES["stories-train"]))
