"""Models whose weights are not all in memory."""

from pathlib import Path

import torch
from conftest import tiny_model
from transformers import AutoModelForCausalLM

import kvfold
from kvfold import FoldedCache
from kvfold.integrations.transformers.calls import cache_argument

GREEDY = {"max_new_tokens": 20, "do_sample": False}


def test_weights_that_are_not_in_memory(tmp_path: Path) -> None:
    """With accelerate's hooks, which bring half of the layers from disk, the cache is the same bit for bit."""
    plain = tiny_model("llama").float()
    plain.save_pretrained(tmp_path / "model")
    layers = plain.config.num_hidden_layers
    places = {f"model.layers.{i}": "disk" if i >= layers // 2 else "cpu" for i in range(layers)}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    apart = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=others | places, offload_folder=tmp_path / "weights", dtype=torch.float32
    ).eval()
    assert next(apart.model.layers[-1].parameters()).is_meta
    ids = torch.randint(0, plain.config.vocab_size, (1, 300))
    said, held = [], []
    for each in (plain, apart):
        kvfold.attach(each)
        cache = FoldedCache(each.config, "kvfold-3")
        said.append(each.generate(ids, **cache_argument(each, cache), **GREEDY))
        held.append(cache.held_bytes())
    assert torch.equal(*said)
    assert held[0] == held[1]
