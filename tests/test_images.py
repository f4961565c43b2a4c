"""Vision-language models, whose text decoder reads a folded cache that holds images' tokens, too."""

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

import kvfold
from kvfold.integrations.transformers.calls import cache_argument

pytestmark = pytest.mark.contract
IMAGE, SIDE = 150, 56
"""An image token's id, and an image's height and width."""
SEES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": 14,
}  # fmt: skip
READS = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


def gemma3() -> PreTrainedModel:
    """Its images attend to themselves in both directions; half of the layers have a window."""
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=READS | windows, vision_config=SEES, mm_tokens_per_image=16, image_token_index=IMAGE)
    )
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # which starts at zero
    return model


def llava() -> PreTrainedModel:
    return LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=READS | {"model_type": "llama"}, vision_config=SEES | {"model_type": "clip_vision_model"},
            image_token_index=IMAGE, image_seq_length=16,
        )
    )  # fmt: skip


def question(model: PreTrainedModel) -> dict[str, Any]:
    """700 tokens with two images of 16 each, the second where pages are folded already."""
    ids = torch.randint(0, 140, (1, 700))
    ids[:, 20:36] = ids[:, 400:416] = IMAGE
    asked = {"input_ids": ids, "pixel_values": torch.randn(2, 3, SIDE, SIDE)}
    return asked | ({"token_type_ids": (ids == IMAGE).long()} if "gemma3" in model.config.model_type else {})


@pytest.mark.parametrize("make", [gemma3, llava])
def test_a_folded_cache_holds_images(make: Any) -> None:
    """Logits after the prompt, and of a token that reads it, are the dense cache's but for what codes lose."""
    torch.manual_seed(0)
    model = make().eval()
    asked, token = question(model), torch.randint(0, 140, (1, 1))

    def logits(cache: Any, **other: Any) -> torch.Tensor:
        said = [model(**(asked | other), **cache_argument(model, cache)).logits[:, 36:]]
        said.append(model(input_ids=token, **cache_argument(model, cache)).logits)
        return torch.cat(said, 1)

    with torch.no_grad():
        dense = logits(DynamicCache(config=model.config))
        blind = logits(DynamicCache(config=model.config), pixel_values=torch.zeros_like(asked["pixel_values"]))
        kvfold.attach(model)
        far = {}
        for format in ("float16", "kvfold-8", "kvfold-4"):
            cache = kvfold.FoldedCache(model.config, format)
            far[format] = ((logits(cache) - dense).norm() / dense.norm()).item()
            assert cache.report().dense_share < 0.2
    images = ((blind - dense).norm() / dense.norm()).item()
    assert far["float16"] < far["kvfold-8"] < far["kvfold-4"] < images / 3
    assert far["kvfold-8"] < 5e-3


@pytest.mark.parametrize("make", [gemma3, llava])
def test_generate_takes_one(make: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    asked, greedy = question(model), {"max_new_tokens": 8, "do_sample": False}
    dense = model.generate(**asked, **greedy)
    folded = model.generate(**asked, custom_generate=kvfold.generate, format="kvfold-8", **greedy)
    assert torch.equal(folded, dense)
