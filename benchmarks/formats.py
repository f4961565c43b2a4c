"""Every block format, and every combination in the TBQ fork's table: bytes, bits, and what they do to a model.

SmolLM2 has heads of 64, Gemma 3 of 256. Formats for 128 only are measured on Gaussian vectors. The table "qjl" asks
with sanctum-mlx: does QJL help keys of 3 bits, and hurt those of 4?

    python benchmarks/formats.py [--passage 1024] [--passages 2] [--json FILE]
    python benchmarks/formats.py --model gemma3-270m --tables qjl
"""

import argparse
import json
import logging
from itertools import product
from pathlib import Path

import models
import torch
from rich.progress import Progress
from rich.table import Table

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import evaluate_formats, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats import PAIRS, get_formats
from kvfold.integrations.transformers.shapes import layer_shapes

KEYS = ("f16", "q8_0", "q4_0", "tbq3", "tbq4", "tbqp3", "tbqp4")
VALUES = ("f16", "q8_0", "q4_0", "tbq3", "tbq4")
OTHERS = ("turboquant-2.5", "turboquant-3.5", "turboquant-3.5q", *PAIRS)
OF_128 = (
    "tq3", "tq4", "polar4", "polar4-u8", "tbq3", "tbq4", "tbqp3", "tbqp4", "amx3", "tbqx3", "q8_0", "q4_0",
    "turboquant-2.5", "turboquant-3.5", "turboquant-3.5q", "uniform-4", "uniform-3r", "affine-4g32", "affine-4g128",
)  # fmt: skip
TABLES = ("combinations", "others", "qjl", "gaussian")
QJL = [f"turboquant-{bits}{qjl}:affine-{values}g32" for bits, values in ((3, 8), (4, 6)) for qjl in ("", "+qjl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--tables", default=",".join(TABLES), help="which to print")
    parser.add_argument("--passage", type=int, default=1_024, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=2, help="how many, spread over the standard library's text")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    logging.getLogger("kvfold").setLevel(logging.ERROR)

    wanted = args.tables.split(",")
    if not set(wanted) <= set(TABLES):
        parser.error(f"--tables {args.tables}: choose from {', '.join(TABLES)}")
    model, tokenizer = models.load(args.model)
    kvfold.attach(model)
    dim = next(shape for shape in layer_shapes(model.config) if shape.folds).key_dim
    passages = text_passages(tokenizer, standard_text(), args.passage, args.passages)
    pairs = [f"{keys}:{values}" for keys, values in product(KEYS, VALUES)]
    groups = {"combinations": ("Combinations", pairs), "others": ("Others", OTHERS), "qjl": ("QJL in keys", QJL)}
    groups = {name: group for name, group in groups.items() if name in wanted}
    names = list(dict.fromkeys(name for _, group in groups.values() for name in group))
    console = to_stdout()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading", total=args.passage * len(passages) * (1 + len(names)))
        rows = evaluate_formats(model, passages, names, progress=lambda n: progress.advance(task, n))
    found = {row.format: row for row in rows}

    out = []
    for title, group in groups.values():
        table = Table("format", "bytes of key + value", "bits a value", "held bits", "KL", "ΔPPL %", title=title)
        for name in group:
            pair, row = get_formats(name, dim, dim), found[name]
            sizes = pair.keys.bytes_per_vector, pair.values.bytes_per_vector
            bits = 4 * sum(sizes) / dim
            table.add_row(
                name, f"{sizes[0]:g} + {sizes[1]:g}", f"{bits:.3g}", f"{row.folded_bits_per_value:.3g}",
                f"{row.kl_mean:.4f}", f"{row.delta_ppl_pct:+.2f}",
            )  # fmt: skip
            out.append({"bytes": sizes, "bits": bits, **row.to_json(table=title)})
        console.print(table)

    if "gaussian" in wanted:
        x = torch.randn(2**14, 128, generator=torch.Generator().manual_seed(0))
        table = Table("format", "bytes", "bits a value", "distortion", title="Gaussian vectors of 128")
        for name in OF_128:
            fmt = kvfold.get_format(name, 128)
            loss = ((fmt.unfold(fmt.fold(x)) - x).square().sum() / x.square().sum()).item()
            table.add_row(name, f"{fmt.bytes_per_vector:g}", f"{fmt.bytes_per_vector / 16:.4g}", f"{loss:.5f}")
            out.append({"table": "128", "format": name, "bytes": fmt.bytes_per_vector, "distortion": loss})
        console.print(table)
    console.print(", ".join(f"{name} {version}" for name, version in versions().items()))
    if args.json:
        args.json.write_text(json.dumps(out, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
