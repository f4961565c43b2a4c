"""Whether two versions of kvfold give the same answers, and read each other's files.

Logits of 1,200 tokens in chunks, computed in float64, and the bytes of a saved cache, as SHA-256: for each model and
format a line. Run it with both versions on one machine and compare what they print. Files of one version go to a
folder with `--save`; the other reads them with `--load`, and says for each whether it holds what is printed there.

    python benchmarks/fingerprints.py [--save FOLDER] [--load FOLDER] [--models demo,llama,qwen3,gemma3] > before.txt
"""

import argparse
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvfold
from kvfold import FoldedCache

FORMATS = ("kvfold-4", "kvfold-3", "kvfold-2", "turboquant-4", "tbq3", "turboquant-2.5", "centred-4")
CHUNKS = (200, 1, 1, 1, 300, 5, 64, 1, 400, 1, 1, 225)
"""1,200 tokens, split before and after formats are fitted, and within pages."""
TINY = {
    "llama": {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gemma3_text": {
        "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 100,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip
"""Small random models: what each config has beside sizes."""


def model_of(name: str) -> PreTrainedModel:
    """The demo model, or a random one, in float64."""
    if name == "demo":
        from kvfold.integrations.models import demo_folder

        return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float64)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        name, hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=512, **TINY[name]
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: FoldedCache, ids: Tensor, chunks: Iterable[int]) -> Tensor:
    """Logits of `ids`, read in chunks."""
    parts, at = [], 0
    for chunk in chunks:
        parts.append(model(ids[:, at : at + chunk], past_key_values=cache).logits)
        at += chunk
    return torch.cat(parts, 1)


def sha(data: bytes) -> str:
    """The first half of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:32]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(("demo", *TINY)), help="separated by commas")
    parser.add_argument("--formats", default=",".join(FORMATS), help="separated by commas")
    parser.add_argument("--save", type=Path, help="keep the saved caches in this folder")
    parser.add_argument("--load", type=Path, help="read caches from this folder, and go on from them")
    args = parser.parse_args()
    wrong = False
    for name in args.models.split(","):
        model = model_of(name)
        kvfold.attach(model)
        ids = torch.randint(10, 500, (1, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
        for format in args.formats.split(","):
            cache = FoldedCache(model.config, format)
            read = sha(logits_of(model, cache, ids, CHUNKS).numpy().tobytes())
            file = (args.save or Path(".")) / f"{name}.{format}.kv"
            cache.save(file)
            bytes_of_file = sha(file.read_bytes())
            if args.save is None:
                file.unlink()
            after = sha(logits_of(model, cache, ids[:, :65], (1, 64)).numpy().tobytes())
            print(f"{name} {format} logits {read} file {bytes_of_file} after {after}", flush=True)
            if args.load is not None:
                loaded = FoldedCache.load(args.load / file.name, model.config)
                same = after == sha(logits_of(model, loaded, ids[:, :65], (1, 64)).numpy().tobytes())
                wrong |= not same
                print(f"{name} {format}: the file of the other version goes on {'as here' if same else 'OTHERWISE'}")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
