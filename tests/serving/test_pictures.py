"""Pictures go to generate, and the texts of sessions and streams beside them are read at places of their own."""

import pytest
import torch
from test_session import SHORT
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, CLIPVisionConfig, LlavaConfig

from dofla.serving import ContinuousBatching, Session, Stream, read_prompt

IMAGE = 60
SIZES = {"vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SIZES |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3}


def seeing(tiny, config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).double().eval()
    return tiny.compressed(model)


def llava(tiny):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**vision, image_size=32, patch_size=8)
    text = CONFIG_MAPPING["llama"](**SIZES)
    model = seeing(tiny, LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE))
    return model, [{"pixel_values": torch.full((1, 3, 32, 32), light).double()} for light in (-1.0, 1.0)]


def qwen(tiny):
    """Its positions are those of the last picture that it saw, unless it is told."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"fullatt_block_indexes": [1], "window_size": 112, "patch_size": 14, "spatial_merge_size": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_start_token_id": IMAGE + 2}
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config=SIZES | {"rope_parameters": rope}, vision_config=vision, vision_end_token_id=IMAGE + 3, **tokens
    )
    kinds = torch.zeros(1, 40, dtype=torch.int64)
    kinds[0, 2:18] = 1
    grid = {"image_grid_thw": torch.tensor([[1, 8, 8]]), "mm_token_type_ids": kinds}
    pictures = [{"pixel_values": torch.full((64, 1176), light).double(), **grid} for light in (-1.0, 1.0)]
    return seeing(tiny, config), pictures


def shown(tiny):
    """Tokens of a text with a picture, and of one without."""
    ids = tiny.tokens(1, 40) % IMAGE
    ids[0, 2:18] = IMAGE
    return ids, tiny.tokens(1, 30, seed=2) % IMAGE


@pytest.mark.slow
@pytest.mark.parametrize("family", [llava, qwen])
def test_texts_beside_pictures_go_on(tiny, family):
    model, pictures = family(tiny)
    ids, text = shown(tiny)
    alone = [model.generate(ids, **picture, **SHORT) for picture in pictures]
    assert not torch.equal(*alone)
    with ContinuousBatching(model) as batching:
        session = Session(batching)
        for turn in range(3):
            for picture, wanted in zip(pictures, alone, strict=True):
                assert torch.equal(batching.generate(ids, **picture, **SHORT), wanted)
            said = session.generate(text, **SHORT)
            assert torch.equal(said, model.generate(text, **SHORT))
            assert session.read == (4 if turn else 29)
            text = torch.cat([said, tiny.tokens(1, 4, seed=turn) % IMAGE], 1)


def test_text_is_read_at_its_own_places_after_a_picture(tiny):
    model, pictures = qwen(tiny)
    ids, text = shown(tiny)
    with torch.no_grad():
        wanted = model(text, use_cache=False).logits[:, -1]
    model.generate(ids, **pictures[0], **SHORT)
    stream = Stream(model)
    logits = [stream.read(piece) for piece in text.split(7, dim=1)][-1][:, -1]
    cache = read_prompt(model, text, chunk=7)
    torch.testing.assert_close(logits, wanted)
    for one, other in zip(cache.layers, stream.cache.layers, strict=True):
        assert all(torch.equal(x.rows, y.rows) for x, y in zip(one.states, other.states, strict=True))
