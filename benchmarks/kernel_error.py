"""What the CPU kernel's own rounding adds to what folding loses.

Power: queries, keys and values of all layers of SmolLM2 for one passage; for the last 128 queries, the squared distance
of the kernel's output from the reference's (in float64, over the same pages) as a share of the squared distance of that
from dense attention.

KL: passages are read with a folded cache, each chunk twice: by the kernel, and by the reference from a copy of the same
cache. So both read the same codes of all earlier chunks, and KL(dense ‖ folded) differs by what the kernel does, not by
codes that fall the other way, as in runs that each have a cache of their own. The change is given with its standard
error, tokens taken as independent.

    python benchmarks/kernel_error.py [--formats kvfold-4,centred-4] [--passage 2048] [--offsets 0,60000] [--json FILE]
"""

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvfold
from kvfold.attention import cpu, reference
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache
from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text, text_passages
from kvfold.evaluate.quality import versions

FORMATS = "kvfold-4,kvfold-3,kvfold-2,centred-4,turboquant-8,turboquant-4"
NEWEST = 128
FIRST, CHUNK = 40, 64
"""Chunks end where a page of kvfold's gets ripe: of what a chunk folds, only its last query reads."""


def heads_of(model: PreTrainedModel, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each layer, (1, heads, tokens, head_dim)."""
    own, layers = model.config._attn_implementation, []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        layers.append((query, key, value))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("record", record)
    model.set_attn_implementation("record")
    model(ids, use_cache=False, logits_to_keep=1)
    model.set_attn_implementation(own)
    return layers


def added_power(format: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    """Σ‖kernel − reference‖² and Σ‖reference − dense‖² of one layer's newest queries."""
    cache, old, scaling = LayerCache(LayerConfig(format)), key.shape[2] - NEWEST, key.shape[3] ** -0.5
    cache.observe(query[:, :, :old], cache.append(key[:, :, :old], value[:, :, :old]))
    new = cache.append(key[:, :, old:], value[:, :, old:])
    rows, dense, q = cache.groups[0].rows, new.dense[0], query[:, :, old:]
    fast = cpu.attend_rows(q, rows, dense, scaling=scaling).double()
    exact = reference.attend_rows(q.double(), rows, dense, scaling=scaling)
    causal = torch.ones(NEWEST, key.shape[2], dtype=torch.bool).tril(old)
    full = scaled_dot_product_attention(
        q.double(), key.double(), value.double(), attn_mask=causal, scale=scaling, enable_gqa=True
    )
    return (fast - exact).square().sum().item(), (exact - full).square().sum().item()


def kl(dense: Tensor, folded: Tensor) -> Tensor:
    """KL(dense ‖ folded) of each token, from log-probabilities."""
    return (dense.exp() * (dense - folded)).sum(-1).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--passage", type=int, default=2048, help="tokens of a passage")
    parser.add_argument("--offsets", default="0,60000", help="where passages start, in tokens")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    formats = args.formats.split(",")

    model, tokenizer = kvfold.demo_model()
    offsets = [int(offset) for offset in args.offsets.split(",")]
    passages = text_passages(tokenizer, standard_text(), args.passage, 1, offsets)
    power = {format: [0.0, 0.0] for format in formats}
    by_kernel: dict[str, list[Tensor]] = {format: [] for format in formats}
    by_reference: dict[str, list[Tensor]] = {format: [] for format in formats}
    with Progress(console=Console(stderr=True)) as progress:
        for layer in progress.track(heads_of(model, passages[0]), description="power"):
            for format in formats:
                power[format] = [a + b for a, b in zip(power[format], added_power(format, *layer), strict=True)]
        task = progress.add_task("KL", total=len(passages) * args.passage * len(formats))

        def log_p(part: Tensor, cache: Any, backend: str | None) -> Tensor:
            kvfold.attach(model, backend)
            logits = model(part, past_key_values=cache, use_cache=True).logits[0]
            kvfold.detach(model)
            return logits.log_softmax(-1)

        for passage in passages:
            dense = DynamicCache(config=model.config)
            caches = {format: kvfold.FoldedCache(model.config, format) for format in formats}
            for part in (passage[:, :FIRST], *passage[:, FIRST:].split(CHUNK, 1)):
                expected = log_p(part, dense, None)
                for format, cache in caches.items():
                    by_reference[format].append(kl(expected, log_p(part, copy.deepcopy(cache), "reference")))
                    by_kernel[format].append(kl(expected, log_p(part, cache, "cpu")))
                    progress.advance(task, part.shape[1])
    rows = []
    for format in formats:
        fast, exact = torch.cat(by_kernel[format]), torch.cat(by_reference[format])
        change, mean = fast - exact, exact.mean()
        rows.append(
            {
                "format": format, "instruction_set": cpu.INSTRUCTION_SETS[0], "tokens": len(change),
                "added_power_pct": 100 * power[format][0] / power[format][1], "kl_reference": mean.item(),
                "kl_kernel": fast.mean().item(), "change_pct": 100 * (change.mean() / mean).item(),
                "standard_error_pct": 100 * (change.std() / len(change) ** 0.5 / mean).item(), "versions": versions(),
            }
        )  # fmt: skip
    table = Table(title=f"SmolLM2-135M, {len(passages)} passages of {args.passage:,} tokens, {cpu.INSTRUCTION_SETS[0]}")
    table.add_column("format")
    for column in ("added power", "KL, reference", "KL, kernel", "change"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["format"]), f"{row['added_power_pct']:.2f} %", f"{row['kl_reference']:.5f}",
            f"{row['kl_kernel']:.5f}", f"{row['change_pct']:+.2f} ± {row['standard_error_pct']:.2f} %",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
