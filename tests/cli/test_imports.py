"""What is imported when: help does not wait for torch, and transformers knows dofla whichever comes first."""

import json
import subprocess
import sys

import pytest

import dofla
from dofla.cli.reproduce import NAMES
from dofla.paper import TABLES

HEAVY = "sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))"
TALK = f"""
import json, sys
from dofla.cli import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["dofla", *words]
    try:
        main()
    except SystemExit as ended:
        found.append([words, ended.code, {HEAVY}])
print(json.dumps(found))
"""
OPEN = """
import sys
{imports}
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained({folder!r}).config._attn_implementation)
"""

MADE = """
import sys, types
import torch, dofla
from transformers import AutoModelForCausalLM, LlamaConfig
with torch.device("meta"):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    from dofla.attention.coding.levels import levels
    kept = [levels(bits) for bits in (1, 2, 3, 4, 5)]
for name, module in sys.modules.items():
    if name.startswith("dofla") and type(module) is types.ModuleType:
        kept += [x for x in vars(module).values() if isinstance(x, torch.Tensor)]
print(len(kept) > 8, {x.device.type for x in kept})
"""


WITHOUT_A_MODEL = {
    "--help": 0,
    "--version": 0,
    "profile --help": 0,
    "reproduce --help": 0,
    "profile demo --bogus": 2,
    "profil": 2,
    "generate demo --prompt a --set seed=x": 2,
    "evaluate no/such/model --data sample": 2,
    "evaluate owner/mistyped --data sample": 2,
    "evaluate demo --data missing.txt": 2,
    "frontier demo --text missing.txt": 2,
    "profile demo --data sample --out .": 2,
    "distill demo --data sample --plan missing.json --out new": 2,
    "allocate missing": 2,
    "run missing": 2,
    "compress demo --set no=1": 2,
    "calibrate demo --out .": 2,
    "chat no/such/model": 2,
}


def last_line(script: str, *words: str) -> str:
    """That a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_what_needs_no_model_imports_none_of_its_machinery():
    found = json.loads(last_line(TALK, json.dumps([command.split() for command in WITHOUT_A_MODEL])))
    assert {" ".join(words): (code, heavy) for words, code, heavy in found} == {
        command: (code, []) for command, code in WITHOUT_A_MODEL.items()
    }


def test_import_dofla_imports_nothing_heavy():
    assert last_line(f"import sys, dofla\nprint({HEAVY})") == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    ["import dofla", "import transformers.modeling_utils\nimport dofla", "import dofla\nimport transformers.trainer"],
)
def test_a_student_opens_whichever_is_imported_first(tiny, tmp_path, imports):
    student = tiny.llama()
    dofla.linear.linearize(student, tiny.plan(student)).save_pretrained(tmp_path / "student")
    assert last_line(OPEN.format(imports=imports, folder=str(tmp_path / "student"))) == "dofla"


@pytest.mark.slow
def test_constants_are_numbers_where_the_first_model_is_made_without_any():
    assert last_line(MADE) == "True {'cpu'}"


def test_all_that_dofla_exports_is_there():
    for module in (dofla, dofla.serving):
        assert set(module.__all__) <= set(dir(module))
        for name in module.__all__:
            assert getattr(module, name).__name__.rpartition(".")[2] == name


def test_help_names_the_tables_that_there_are():
    assert list(TABLES) == NAMES.split(", ")


@pytest.mark.slow
def test_packages_that_are_imported_say_nothing():
    done = subprocess.run([sys.executable, "-m", "dofla", "check", "demo"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
