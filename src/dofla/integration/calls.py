"""The prompt and the settings of a call of ``generate``."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ALONE: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
    "use_mtp": (False,),
    "token_healing": (False,),
    "guidance_scale": (1, 1.0),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "low_memory": (False,),
}
"""Settings with which a call writes one text, by a cache of its own, and shows nothing of how it read the prompt, if
they have one of these values or none."""
_HARMLESS = _words(
    "max_length max_new_tokens min_length min_new_tokens max_time stop_strings early_stopping do_sample temperature "
    "top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids renormalize_logits "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens sequence_bias watermarking_config output_scores output_logits return_dict_in_generate "
    "pad_token_id bos_token_id eos_token_id decoder_start_token_id compile_config disable_compile prefill_chunk_size "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
    "max_matching_ngram_size assistant_lookbehind target_lookbehind _from_model_config transformers_version"
)
"""Settings on which only the tokens that are written depend, or nothing in a call without an assistant."""
_INPUTS = _words(
    "input_ids attention_mask generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn streamer "
    "tokenizer"
)


def text_alone(model: PreTrainedModel, inputs: Tensor | None, options: dict[str, Any]) -> Tensor | None:
    """The prompt [1, L] of a call that goes on with one text, read by its tokens alone; None for a call with anything
    else, or with an argument that is not known here."""
    given = {name: value for name, value in options.items() if value is not None}
    ids, mask = given.get("input_ids", inputs), given.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1 or not ids.shape[1]:
        return None
    if "input_ids" in given and inputs is not None:
        return None  # transformers refuses it
    if not given.keys() <= _INPUTS | _HARMLESS | _ALONE.keys():
        return None
    configs = (given.get("generation_config"), model.generation_config)
    for config in filter(None, configs):
        special = {name for name, value in config.to_diff_dict().items() if value is not None}
        if not special <= _HARMLESS | _ALONE.keys():
            return None
    if any(setting(model, name, options) not in (None, *values) for name, values in _ALONE.items()):
        return None
    if mask is None:  # generate takes tokens of padding for padding
        pad = setting(model, "pad_token_id", options)
        return None if pad is not None and bool((ids == pad).any()) else ids
    plain = isinstance(mask, Tensor) and mask.shape == ids.shape and bool(mask.all())
    return ids if plain else None


def setting(model: PreTrainedModel, name: str, options: dict[str, Any]) -> Any:
    """A setting of a call, as ``generate`` finds it."""
    configs = (options.get("generation_config"), model.generation_config)
    found = [options.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in found if value is not None), None)
