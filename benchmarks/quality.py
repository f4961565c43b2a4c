"""Quality of formats on the demo model: perplexity, KL and top-1 against a dense cache.

Four passages of 1,024 tokens of the standard library's text (token offsets 0, 30,000, 60,000, 90,000), each read
with a fresh cache through the real attention path. PPL is over all four; KL and top-1 over the first two.

A second row for each format that keeps tokens dense, marked "all folded", measures its codec alone: every token but the
sinks is folded before any query reads it, the newest ones too. No cache works so; it compares codecs.

    python benchmarks/quality.py [--formats kvfold-4,turboquant-4] [--json FILE]
"""

import argparse
import json
import platform
import time

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

import kvfold
from kvfold.evaluate import FidelityMeter, read_in_lockstep, standard_text
from kvfold.evaluate.text import text_sha256


class RoundTripCache(DynamicCache):
    """A dense cache of what folding and unfolding leaves of each token but the sinks; takes one whole passage."""

    def __init__(self, config: transformers.PreTrainedConfig, format: str) -> None:
        super().__init__(config=config)
        self.format = format

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[no-untyped-def]
        pair = kvfold.get_formats(self.format, key_states.shape[-1], value_states.shape[-1])
        sinks = pair.window.sinks
        key_states, value_states = (
            torch.cat((x[:, :, :sinks], fmt.unfold(fmt.fold(x[:, :, sinks:]))), dim=2)
            for fmt, x in ((pair.keys, key_states), (pair.values, value_states))
        )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


OFFSETS = (0, 30_000, 60_000, 90_000)
PASSAGE = 1_024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="kvfold-4,turboquant-8,turboquant-4,turboquant-3,turboquant-2")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    names = args.formats.split(",")

    model, tokenizer = kvfold.demo_model()
    kvfold.attach(model)
    text = standard_text()
    ids = tokenizer(text, return_tensors="pt").input_ids
    windowed = [name for name in names if not kvfold.get_formats(name, 64, 64).folds_by_token]
    codecs = {f"{name}, all folded": name for name in windowed}
    meters = {name: FidelityMeter() for name in ["dense", *names, *codecs]}
    caches = {}
    start = time.perf_counter()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=len(OFFSETS) * PASSAGE * len(meters))
        for offset in OFFSETS:
            caches = {name: kvfold.FoldedCache(model.config, name) for name in names}
            caches |= {row: RoundTripCache(model.config, name) for row, name in codecs.items()}
            read_in_lockstep(
                model, ids[:, offset : offset + PASSAGE], DynamicCache(config=model.config), caches, meters,
                chunk=PASSAGE, progress=lambda n: progress.advance(task, n),
            )  # fmt: skip

    dense = meters["dense"].result()
    rows = []
    for name in caches:
        result = meters[name].result(kl_tokens=2 * (PASSAGE - 1))
        rows.append({
            "model": "smollm2", "text_sha": text_sha256(text), "n_tokens": dense.tokens, "format": name,
            "ppl_dense": dense.ppl, "ppl": result.ppl, "delta_ppl_pct": 100 * (result.ppl / dense.ppl - 1),
            "kl_mean": result.kl_mean, "kl_p99": result.kl_p99, "top1": result.top1,
            "bits_per_value": None if name in codecs else caches[name].bits_per_value(),
        })  # fmt: skip
    table = Table(title=f"SmolLM2-135M, dense PPL {dense.ppl:.3f}, {time.perf_counter() - start:.0f} s")
    for column in ("format", "ΔPPL", "KL", "KL p99", "top-1", "held bits/value at 1,024"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for row in rows:
        table.add_row(
            row["format"], f"{row['delta_ppl_pct']:+.2f} %", f"{row['kl_mean']:.4f}", f"{row['kl_p99']:.3f}",
            f"{row['top1']:.3f}", "-" if row["bits_per_value"] is None else f"{row['bits_per_value']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        versions = {
            "kvfold": kvfold.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
        }  # fmt: skip
        with open(args.json, "w") as file:
            json.dump([row | {"versions": versions} for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
