"""What a format's codec costs the demo model by itself, without the tokens that a cache keeps dense.

Every token but the sinks is folded and unfolded before any query reads it, the newest ones too. No cache works so
(`kvfold eval` measures what caches do); it compares codecs, and is how most published figures were taken.

Passages of 1,024 tokens of the standard library's text.

    python benchmarks/quality.py [--formats kvfold-4,turboquant-4] [--offsets 0,30000,60000,90000] [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

import kvfold
from kvfold.evaluate import FidelityMeter, read_in_lockstep, split_passages, standard_text
from kvfold.evaluate.quality import versions
from kvfold.evaluate.text import text_sha256

PASSAGE = 1_024


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="kvfold-4,turboquant-4,turboquant-3")
    parser.add_argument("--offsets", default="0,30000,60000,90000", help="where passages start, in tokens")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    names = args.formats.split(",")

    model, tokenizer = kvfold.demo_model()
    kvfold.attach(model)
    text = standard_text()
    ids = tokenizer(text, return_tensors="pt").input_ids
    passages = split_passages(ids, PASSAGE, count=1, offsets=[int(offset) for offset in args.offsets.split(",")])
    meters = {name: FidelityMeter() for name in ["dense", *names]}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("reading", total=len(passages) * PASSAGE * len(meters))
        for passage in passages:
            caches = {name: RoundTripCache(model.config, name) for name in names}
            read_in_lockstep(
                model, passage, DynamicCache(config=model.config), caches, meters,
                chunk=PASSAGE, progress=lambda n: progress.advance(task, n),
            )  # fmt: skip

    dense = meters["dense"].result()
    rows = []
    table = Table(title=f"SmolLM2-135M, codecs alone, dense PPL {dense.ppl:.3f}")
    for column in ("format", "ΔPPL", "KL", "KL p99", "top-1"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name in names:
        result = meters[name].result()
        delta = 100 * (result.ppl / dense.ppl - 1)
        table.add_row(
            name, f"{delta:+.2f} %", f"{result.kl_mean:.4f}", f"{result.kl_p99:.3f}", f"{result.top1:.3f}"
        )  # fmt: skip
        rows.append({
            "model": "smollm2", "text_sha": text_sha256(text), "offsets": args.offsets, "n_tokens": result.tokens,
            "format": name, "ppl_dense": dense.ppl, "ppl": result.ppl, "delta_ppl_pct": delta,
            "kl_mean": result.kl_mean, "kl_p99": result.kl_p99, "top1": result.top1, "versions": versions(),
        })  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
