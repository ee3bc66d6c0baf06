"""The names of transformers that src/dofla uses and transformers' documentation does not promise.

What is imported from `transformers` itself is promised, and no name with an underscore is. A new name is listed here on
purpose, or avoided; one that transformers no longer has fails by its name.
"""

import ast
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
import transformers
from torch import nn
from transformers.quantizers import HfQuantizer

import dofla

SOURCE = Path(dofla.__file__).parent
KINDS = (transformers.PreTrainedModel, transformers.PreTrainedConfig(), transformers.GenerationMixin)
KINDS += (transformers.GenerationConfig(), transformers.CompileConfig(), transformers.Cache)
KINDS += (transformers.PreTrainedTokenizerBase, HfQuantizer)

NAMES = """
transformers.cache_utils.CacheLayerMixin
transformers.cli.serving.chat_completion.ChatCompletionHandler
transformers.cli.serving.completion.CompletionHandler
transformers.cli.serving.model_manager.ModelManager
transformers.cli.serving.response.ResponseHandler
transformers.cli.serving.server.build_server
transformers.cli.serving.utils.BaseHandler
transformers.cli.serving.utils.GenerateManager
transformers.cli.serving.utils.GenerationState
transformers.generation.GenerationMode
transformers.generation.streamers.BaseStreamer
transformers.integrations.sdpa_attention.sdpa_attention_forward
transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
transformers.masking_utils.AttentionMaskInterface
transformers.masking_utils.bidirectional_mask_function
transformers.masking_utils.causal_mask_function
transformers.masking_utils.sdpa_mask
transformers.modeling_layers.GradientCheckpointingLayer
transformers.modeling_outputs.BaseModelOutputWithPast
transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
transformers.models.auto.modeling_auto
transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
transformers.pytorch_utils.Conv1D
transformers.quantizers.AutoHfQuantizer
transformers.quantizers.HfQuantizer
transformers.quantizers.register_quantization_config
transformers.quantizers.register_quantizer
transformers.utils.CONFIG_NAME
transformers.utils.ModelOutput
transformers.utils.cached_file
transformers.utils.logging
transformers.utils.quantization_config.QuantizationConfigMixin
"""
"""Modules and what is taken from them."""

ATTRIBUTES = """
_attn_implementation
_compile_all_devices
_dequantize
_keep_in_fp32_modules_strict
_name_or_path
_prepare_position_ids_for_generation
_process_model_after_weight_loading
_process_model_before_weight_loading
_upload_modified_files
"""
"""Private attributes of its objects."""


@cache
def sources() -> list[ast.AST]:
    return [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def dotted(node: ast.AST) -> str | None:
    """``a.b.c`` of nested attributes."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def is_promised(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 2 and not parts[1].startswith("_") and parts[1] in transformers.__all__


def names_used() -> set[str]:
    """``transformers.module.name`` of imports, of attributes of the package, and of strings that are such a path."""
    found = set()
    for node in sources():
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {f"{module}.{alias.name}" for alias in names}
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.Attribute():
                found.add(dotted(node))
            case ast.Constant(value=str(text)) if re.fullmatch(r"transformers(\.\w+)+", text):
                found.add(text)
    found = {name for name in found if name and name.startswith("transformers.") and not is_promised(name)}
    return found - {"transformers.__version__"}


def attributes_used() -> set[str]:
    """Private ones of transformers' objects that are read, set or overridden, and are not torch's."""
    found = set()
    for node in sources():
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.ClassDef(body=body):
                found |= {method.name for method in body if isinstance(method, ast.FunctionDef)}
    found = {name for name in found if re.match(r"_[a-z]", name)}
    return {name for name in found if not hasattr(nn.Module(), name) and any(hasattr(kind, name) for kind in KINDS)}


@pytest.mark.parametrize("kind", ["names", "attributes"])
def test_the_internals_of_transformers_that_dofla_uses_are_listed(kind):
    used = names_used() if kind == "names" else attributes_used()
    listed = set((NAMES if kind == "names" else ATTRIBUTES).split())
    new, gone = used - listed, listed - used
    assert not new, f"internals of transformers that are not listed in {Path(__file__).name}: {', '.join(sorted(new))}"
    assert not gone, f"no longer used, take them off the list in {Path(__file__).name}: {', '.join(sorted(gone))}"


@pytest.mark.parametrize("name", NAMES.split())
def test_transformers_has_it(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        users = [str(p.relative_to(SOURCE)) for p in SOURCE.rglob("*.py") if name.rpartition(".")[2] in p.read_text()]
        pytest.fail(f"transformers {transformers.__version__} has no {name}, which is used in {', '.join(users)}")
