"""What a cache adds to the peak memory of a process: run as a process of its own, with the cache's format or "dense".

Three rows of 2,000 tokens in bfloat16, with SmolLM2's layers and KV heads in a model that does little else. Attention
reads the last chunk of the prompt and four tokens; what came before them is put into the cache without it, which would
take minutes.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import transformers
from memory import status
from transformers import DynamicCache

import kvfold
from kvfold.cache.report import held_bytes

LAYERS, HEADS, DIM = 30, 3, 64
ROWS, CONTEXT, CHUNK = 3, 2000, 250


@torch.no_grad()
def measure(name: str) -> dict[str, int]:
    """Bytes that the cache holds, and that the process had at most above what it had before."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=HEADS * DIM, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=DIM,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().bfloat16()
    assert kvfold.attach(model)
    ids = torch.randint(0, 256, (ROWS, CONTEXT + 4))
    model(ids[:, :CHUNK], logits_to_keep=1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts again from the present one
    before = status("VmRSS")
    cache = DynamicCache(config=config) if name == "dense" else kvfold.FoldedCache(config, name)
    for _ in range(0, CONTEXT - CHUNK, CHUNK):
        _append(cache, model)
    for chunk in ids[:, CONTEXT - CHUNK :].split([CHUNK, 1, 1, 1, 1], 1):
        model(chunk, past_key_values=cache, logits_to_keep=1)
    assert cache.get_seq_length() == CONTEXT + 4
    return {"held_bytes": held_bytes(cache.layers), "peak_added_bytes": status("VmHWM") - before}


def _append(cache: transformers.Cache, model: transformers.PreTrainedModel) -> None:
    """A chunk's random keys and values in all layers."""
    folded = isinstance(cache, kvfold.FoldedCache)
    if folded:
        cache.begin_pass(model, model.model, None, None)
    for layer in range(LAYERS):
        query, key, value = torch.randn(3, ROWS, HEADS, CHUNK, DIM, dtype=torch.bfloat16)
        handle, _ = cache.update(key, value, layer)
        if folded:
            handle.appended.layer.observe(query, handle.appended)
    if folded:
        cache.end_pass(broken=False)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
