"""kvfold's keys at head dimensions that no packaged model has: drawn keys with recorded statistics.

There is no real model of head_dim 80, 96, 128 or 256 among packages, so this is no measure of quality. Keys and queries
are Gaussian, channel by channel as large as those of SmolLM2's layers are (its sorted spectra, resampled to the head
dimension), around a common part as large as its page centres. What is reported is the share of the scores' variance
that folding loses, Σ E[q_c²]·e_c² over Σ E[q_c²]·Var(k_c), with formats fitted as in a cache. The first row of each
table checks the drawing against the heads themselves.

    python benchmarks/quality/head_dims.py [--bits 4,3,2] [--json FILE]
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats import KeyStatistics
from kvfold.integrations.transformers.layer import FoldedLayer

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models

FAMILIES = ("turboquant", "hadamard", "centred", "kvfold")
HEAD_DIMS = (64, 80, 96, 128, 256)
TOKENS = 1_024


def resampled(spectrum: Tensor, head_dim: int) -> Tensor:
    """Sorted spectra (heads, D) at another head dimension, on a logarithmic scale."""
    log = spectrum.clamp_min(1e-12).log().unsqueeze(1)
    return torch.nn.functional.interpolate(log, head_dim, mode="linear", align_corners=True).squeeze(1).exp()


def lost(format: str, key: Tensor, energy: Tensor) -> float:
    """Share of the scores' variance that is lost, over heads: key (heads, T, D), energy (heads, D)."""
    statistics = KeyStatistics.of(key[:, :240], energy.unsqueeze(1), 64)
    fmt = kvfold.get_format(format, key.shape[-1])
    fmt = fmt.fitted(statistics) if fmt.awaits_fit else fmt
    error = (fmt.unfold(fmt.fold(key)) - key).square().mean(1)
    variance = key.unflatten(1, (-1, 64)).var(2, correction=0).mean(1)
    return ((energy * error).sum(-1) / (energy * variance).sum(-1)).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    formats = [f"{family}-{bits}" for bits in args.bits.split(",") for family in FAMILIES]

    model, tokenizer = models.load(args.model)
    calibration = kvfold.calibrate(model, text_passages(tokenizer, standard_text(), TOKENS, 2))
    cache = kvfold.FoldedCache(model.config, "float16")
    model(text_passages(tokenizer, standard_text(), TOKENS + 16, 1)[0], past_key_values=cache)
    folded = [layer.folded for layer in cache.layers if isinstance(layer, FoldedLayer)]
    real = torch.cat([layer.unfold(torch.float32)[0][0, :, 16:] for layer in folded])
    energy = torch.cat([statistics.query_energy for statistics in calibration.layers.values()])
    variance = torch.cat([statistics.key_variance for statistics in calibration.layers.values()])
    common = real.unflatten(1, (-1, 64)).mean(2).square().mean(1)

    rows = [{"head_dim": real.shape[-1], "keys": "real"} | {format: lost(format, real, energy) for format in formats}]
    order = (energy * variance).argsort(dim=-1, descending=True)
    spectra = [s.take_along_dim(order, -1) for s in (energy, variance, common)]
    generator = torch.Generator().manual_seed(0)
    for head_dim in HEAD_DIMS:
        q, k, z = (resampled(s, head_dim) for s in spectra)
        shape = (len(q), TOKENS, head_dim)
        drawn = torch.randn(shape, generator=generator) * k.sqrt().unsqueeze(1)
        drawn += torch.randn(len(q), 1, head_dim, generator=generator) * z.sqrt().unsqueeze(1)
        shuffle = torch.randperm(head_dim, generator=generator)
        rows.append(
            {"head_dim": head_dim, "keys": "drawn"}
            | {format: lost(format, drawn[..., shuffle], q[:, shuffle]) for format in formats}
        )
    for bits in args.bits.split(","):
        table = Table(title=f"Share of the scores' variance lost at {bits} bits")
        table.add_column("head_dim")
        for family in FAMILIES:
            table.add_column(family, justify="right")
        for row in rows:
            cells = (f"{100 * row[f'{family}-{bits}']:.2f} %" for family in FAMILIES)
            table.add_row(f"{row['head_dim']} ({row['keys']})", *cells)
        to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps([row | {"versions": versions()} for row in rows], indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
