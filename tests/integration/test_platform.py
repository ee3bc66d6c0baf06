"""What dofla leans on in transformers, torch and accelerate: each test names the thing that has changed if it fails.

A failure here explains failures elsewhere: start with it after an update.
"""

import inspect
import json
import sys

import accelerate
import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    StaticLayer,
    cache_utils,
    masking_utils,
    modeling_layers,
    quantizers,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import dofla
from dofla.integration.cache import CACHE_ARGUMENT, StateLayer
from dofla.integration.quantizer import DoflaQuantizer

VERSIONS = f"(transformers {transformers.__version__}, accelerate {accelerate.__version__}, torch {torch.__version__})"


def parameters(function):
    return list(inspect.signature(function).parameters)


def same(what, found, known, where):
    """Fail, saying what was added or taken away, and where dofla has to follow."""
    found, known = set(found), set(known)
    change = [f"new: {', '.join(sorted(found - known))}"] * bool(found - known)
    change += [f"gone: {', '.join(sorted(known - found))}"] * bool(known - found)
    assert not change, f"{what} changed {VERSIONS}: {'; '.join(change)}; see {where}"


@pytest.fixture
def probes(tiny):
    """A model whose attention and mask functions note what they are called with: (model, calls by kind)."""
    calls = {"attention": [], "mask": []}

    def attention(*args, **kwargs):
        calls["attention"].append((args, kwargs))
        return sdpa_attention_forward(*args, **kwargs)

    def mask(*args, **kwargs):
        calls["mask"].append((args, kwargs))
        return masking_utils.sdpa_mask(*args, **kwargs)

    AttentionInterface.register("probe", attention)
    AttentionMaskInterface.register("probe", mask)
    model = tiny.llama()
    model.set_attn_implementation("probe")
    return model, calls


def test_attention_functions_are_called_as_ever(probes, tiny):
    model, calls = probes
    model(tiny.tokens(2, 5))
    assert len(calls["attention"]) == 2, f"the attention interface does not reach every layer {VERSIONS}: interface.py"
    args, kwargs = calls["attention"][0]
    assert len(args) == 5, f"attention functions get {len(args)} arguments by position, not 5 {VERSIONS}: interface.py"
    module, query, key, value, _ = args
    shapes = [list(x.shape) for x in (query, key, value)]
    heads = "queries, keys and values are no longer [batch, heads, length, size], with fewer heads for keys"
    assert shapes == [[2, 4, 5, 8], [2, 2, 5, 8], [2, 2, 5, 8]], f"{heads} {VERSIONS}: {shapes}; interface.py"
    assert "scaling" in kwargs, f"attention functions are not told the scaling {VERSIONS}: interface.py"
    for name in ("config", "layer_idx"):
        assert hasattr(module, name), f"attention modules have no {name} {VERSIONS}: cache.py, sites.py"
    assert model.config._attn_implementation == "probe", f"config._attn_implementation is gone {VERSIONS}: sites.py"


def test_mask_functions_are_called_as_ever(probes, tiny):
    model, calls = probes
    model(**tiny.padded(2, 6))
    (args, kwargs), *_ = calls["mask"]
    assert not args, f"mask functions get arguments by position {VERSIONS}: padding_mask in interface.py"
    ours = set(parameters(AttentionMaskInterface()["dofla"])) - {"kwargs"}
    missing = ours - kwargs.keys()
    assert not missing, f"mask functions do not get {sorted(missing)} {VERSIONS}: padding_mask in interface.py"
    for name in ("flash_attention_mask", "sdpa_mask"):
        unknown = ours - set(parameters(getattr(masking_utils, name)))
        assert not unknown, f"{name} takes no {sorted(unknown)} {VERSIONS}: padding_mask in interface.py"
    causal = kwargs["mask_function"] is masking_utils.causal_mask_function
    assert causal, f"plain causal masks are no longer causal_mask_function itself {VERSIONS}: interface.py"


def test_cache_layers_have_the_methods_that_ours_answer():
    known = {"lazy_initialization", "update", "get_seq_length", "get_mask_sizes", "get_max_length", "reset", "offload"}
    known |= {"prefetch", "reorder_cache", "batch_select_indices", "batch_repeat_interleave", "crop"}
    found = {name for kind in (CacheLayerMixin, DynamicLayer) for name in vars(kind) if not name.startswith("_")}
    found = {name for name in found if callable(getattr(DynamicLayer, name))}
    same("the methods of transformers' cache layers", found, known, "StateLayer in cache.py")
    for name in sorted(known - {"update", "offload", "prefetch"}):
        theirs, ours = (parameters(getattr(kind, name)) for kind in (DynamicLayer, StateLayer))
        assert theirs == ours, f"cache layers' {name} takes {theirs}, ours {ours} {VERSIONS}: cache.py"
    for name in ("is_sliding", "is_initialized"):
        assert hasattr(DynamicLayer(), name), f"cache layers have no {name} {VERSIONS}: cache.py"


def test_a_cache_is_a_list_of_layers_that_attention_modules_get(tiny):
    model, caches = tiny.llama(), []

    def look(module, args, kwargs):
        caches.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Cache))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    cache = model(tiny.tokens(1, 4)).past_key_values
    assert [x is cache for x in caches] == [True, True], f"attention modules do not get the cache {VERSIONS}: cache.py"
    kinds = {type(layer) for layer in cache.layers}
    assert kinds == {DynamicLayer}, f"cache.layers holds {kinds} {VERSIONS}: state_entry in cache.py"
    assert callable(DynamicCache().layer_class_to_replicate), f"caches cannot grow {VERSIONS}: state_entry in cache.py"
    assert issubclass(StaticLayer, CacheLayerMixin), f"static caches have other layers {VERSIONS}: cache.py"
    both = cache_utils.EncoderDecoderCache(cache, DynamicCache())
    assert both.self_attention_cache is cache, f"EncoderDecoderCache has no self_attention_cache {VERSIONS}: cache.py"


@pytest.mark.filterwarnings("error:`past_key_values` is deprecated")
@torch.no_grad()
def test_models_are_called_by_the_names_of_the_installed_transformers(tiny):
    text, options = tiny.tokens(1, 9), {"max_new_tokens": 2, "do_sample": False}
    student = dofla.linear.linearize(tiny.llama(), budget=16)
    student(text[:, :2], use_cache=True, **{CACHE_ARGUMENT: dofla.serving.read_prompt(student, text)})
    dofla.serving.Stream(student).read(text)
    with dofla.serving.ContinuousBatching(student) as batching:
        dofla.serving.Session(batching).generate(text, **options)


def test_quantizers_are_asked_before_and_after_weights_load(tiny, tmp_path, monkeypatch):
    asked = []
    for name in ("_process_model_before_weight_loading", "_process_model_after_weight_loading"):
        assert hasattr(quantizers.HfQuantizer, name), f"HfQuantizer has no {name} {VERSIONS}: quantizer.py"
        own = getattr(DoflaQuantizer, name)

        def note(self, model, name=name, own=own, **kwargs):
            asked.append(name)
            return own(self, model, **kwargs)

        monkeypatch.setattr(DoflaQuantizer, name, note)
    model = tiny.llama()
    dofla.linear.linearize(model, tiny.plan(model)).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(asked) == 2, f"from_pretrained asks registered quantizers for {asked} only {VERSIONS}: quantizer.py"
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" in config, f"quantization_config is not saved {VERSIONS}: quantizer.py"


def test_families_with_arithmetic_of_their_own_have_their_eager_function():
    import transformers.models.gemma2.modeling_gemma2 as gemma2
    import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss

    for module in (gemma2, gpt_oss):
        eager = getattr(sys.modules[module.__name__], "eager_attention_forward", None)
        assert eager is not None, f"{module.__name__} has no eager_attention_forward {VERSIONS}: interface.py"
        lost = {"module", "query", "key", "value", "attention_mask", "scaling"} - set(parameters(eager))
        assert not lost, f"eager attention of {module.__name__} takes no {sorted(lost)} {VERSIONS}: interface.py"


def test_layers_are_of_the_kind_that_is_computed_again_for_gradients(tiny):
    kind = modeling_layers.GradientCheckpointingLayer
    for model in (tiny.llama(), tiny.gpt2(), tiny.bert(), tiny.vit()):
        layers = [module for module in model.modules() if isinstance(module, kind)]
        assert len(layers) == 2, f"layers of {type(model).__name__} are no {kind.__name__} {VERSIONS}: trainable.py"


def test_offloaded_modules_have_accelerates_hooks(tiny, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places | {"model.layers": "disk"})
    weight = model.model.layers[0].mlp.up_proj
    hook = getattr(weight, "_hf_hook", None)
    assert isinstance(hook, AlignDevicesHook), f"offloaded modules have no _hf_hook {VERSIONS}: offload.py"
    assert hook.offload, f"hooks of offloaded modules say nothing in `offload` {VERSIONS}: offload.py"
    hook.pre_forward(weight)
    assert not weight.weight.is_meta, f"pre_forward does not read weights {VERSIONS}: offload.py"
