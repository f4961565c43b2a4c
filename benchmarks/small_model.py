"""A part of SmolLM2 that is quick: its first layers and its commonest tokens, in a folder of its own.

Weights, tokenizer and text are real, so keys, values and attention are, too. What it predicts is not worth reading, so
tests that ask what a model says take the whole one.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

LAYERS = 6
TOKENS = 4_096
"""Tokens are numbered by how early byte-pair encoding merges them, so the first are a vocabulary by themselves."""


def make_small_model(whole: Path, folder: Path) -> Path:
    """Write the part of the model in `whole` to `folder`, and return that."""
    folder.mkdir()
    config = json.loads((whole / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "vocab_size": TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes((whole / name).read_bytes())

    tokenizer = json.loads((whole / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < TOKENS}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    weights = {}
    with safe_open(whole / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            parts = name.split(".")
            if parts[:2] == ["model", "layers"] and int(parts[2]) >= LAYERS:
                continue
            tensor = file.get_tensor(name)
            own = tensor[:TOKENS] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
            if name == "model.norm.weight":
                own = own / 2  # with fewer layers before it, predictions would be far too sure
            weights[name] = own.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
