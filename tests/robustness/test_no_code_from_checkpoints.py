"""Nothing that lies in a checkpoint is executed: no module of its own, no pickle, of no model and no student."""

import json
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from command_line import call

import dofla
from dofla.runs.opening import open_original

MODULE = """
import pathlib
pathlib.Path({mark!r}).write_text("executed")
from transformers import LlamaConfig as OwnConfig, LlamaForCausalLM as OwnModel, PreTrainedTokenizerFast as OwnTokenizer
"""


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.write_text, (self.mark, "executed")


def change(path: Path, **fields) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | fields))


@pytest.fixture(params=["known architecture", "own architecture", "pickled weights", "pickled adapter of peft"])
def trapped(request, made, tmp_path):
    """Copies of a model and of its students with a trap in each, and the file that tells when one has snapped."""
    mark = tmp_path / "executed"
    for name in ("model", "standalone", "adapter"):
        shutil.copytree(made / name, tmp_path / name)
    change(tmp_path / "adapter" / "dofla_adapter.json", base_model=str(tmp_path / "model"))
    shutil.copyfile(made / "text.txt", tmp_path / "text.txt")
    for folder in (tmp_path / "model", tmp_path / "standalone", tmp_path / "adapter"):
        if "architecture" in request.param:
            (folder / "own.py").write_text(MODULE.format(mark=str(mark)))
            classes = dict.fromkeys(("AutoModel", "AutoModelForCausalLM"), "own.OwnModel")
            classes["AutoConfig"] = "own.OwnConfig"
            own = {"architectures": ["OwnModel"]} | ({"model_type": "own"} if request.param[0] == "o" else {})
            change(folder / "config.json", auto_map=classes, **own)
            change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
            change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
        elif request.param == "pickled weights":
            (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
            for path in folder.glob("*.safetensors"):
                path.unlink()
        else:
            torch.save({"x": torch.zeros(1), "bomb": Bomb(mark)}, folder / "adapter_model.bin")
            change(folder / "adapter_config.json", peft_type="LORA", r=1, target_modules=["q_proj"])
    return tmp_path, mark


def test_the_traps_would_snap(tmp_path):
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()
    mark.unlink()
    exec(MODULE.format(mark=str(mark)), {})
    assert mark.exists()


def test_opening_executes_nothing(trapped, capsys):
    folder, mark = trapped
    for attempt in (
        lambda: open_original(str(folder / "model")),
        lambda: dofla.load(folder / "standalone"),
        lambda: dofla.load(folder / "adapter"),
    ):
        with suppress(dofla.DoflaError):
            attempt()
        assert not mark.exists()
    text = ["--data", folder / "text.txt", "--length", 16, "--windows", 4]
    for words in (
        ["profile", folder / "model", *text, "--set", "samples=16", "--out", folder / "profile"],
        ["evaluate", folder / "standalone", *text],
        ["generate", folder / "adapter", "--prompt", "w1", "--new-tokens", 2],
    ):
        assert call(*words) in (0, 2)
        assert not mark.exists()
    assert "Traceback" not in capsys.readouterr().err
