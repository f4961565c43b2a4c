"""Numbers in a long text: which caches still find them, and how surely the dense one does.

Cases are those of `kvfold tasks --tasks needle`. A cache reads the prompt; then the digits of the right answer are
given one by one, and each must be the model's first choice, as when it answers by itself. The margin of a case is how
far the right digit is ahead of the next best, in nats, at the digit where it is least. A case whose dense margin is
small is nearly a tie, which any change decides: rounding to 16 bits moves margins, too, and is measured beside.

    python benchmarks/quality/needles.py [--model gemma3-270m] [--lengths 1000,2000,3000,4000] [--seeds 3] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate.behaviour.needle import Needle
from kvfold.evaluate.quality import versions

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models

DENSE = "dense"
BINS = (0.0, 0.25, 0.5, 1.0)
"""Lower ends of the dense margins, in nats, by which cases are counted."""


def margin(model: PreTrainedModel, cache: Any, ids: Tensor, answer: Tensor, chunk: int = 512) -> float:
    """Nats by which the right token is ahead of the next best, where it is least; below 0 if another is ahead."""
    for part in ids[:, :-1].split(chunk, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    logits = model(torch.cat((ids[:, -1:], answer[:, :-1]), 1), past_key_values=cache).logits[0].float()
    right = logits.gather(-1, answer[0, :, None])
    others = logits.scatter(-1, answer[0, :, None], -torch.inf).amax(-1, keepdim=True)
    return float((right - others).min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--formats", default="kvfold-4,kvfold-3,kvfold-2,turboquant-4,turboquant-3")
    parser.add_argument("--lengths", default="1000,2000,3000,4000", help="tokens of the prompts")
    parser.add_argument("--seeds", type=int, default=3, help="for each, a needle at five depths of each length")
    parser.add_argument(
        "--json", type=Path, help="also write the rows to this file, as they come; those in it are kept"
    )
    args = parser.parse_args()

    model, tokenizer = models.load(args.model)
    rounded, _ = kvfold.load_model(models.folder_of(args.model), torch.bfloat16)
    kvfold.attach(model)
    caches: dict[str, tuple[PreTrainedModel, Callable[[], Any]]] = {
        DENSE: (model, lambda: DynamicCache(config=model.config)),
        "dense, bfloat16": (rounded, lambda: DynamicCache(config=model.config)),
    }
    for format in args.formats.split(","):
        caches[format] = model, lambda format=format: kvfold.FoldedCache(model.config, format)  # type: ignore[misc]
    lengths = tuple(int(length) for length in args.lengths.split(","))
    cases = [case for seed in range(args.seeds) for case in Needle(lengths, repeats=1).cases(tokenizer, seed)]
    about = {"model": args.model, "versions": versions()}
    rows: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text())
        if kept["model"] != args.model:
            parser.error(f"--json {args.json} is of {kept['model']}: give another file")
        rows = kept["rows"]
    done = {(row["case"], row["cache"]) for row in rows}
    with torch.no_grad(), Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("needles", total=len(cases) * len(caches))
        for case in cases:
            ids = torch.tensor([case.turns[0].ids])
            answer = tokenizer(f" {case.expected}", add_special_tokens=False, return_tensors="pt").input_ids
            for name, (reader, make) in caches.items():
                if (case.name, name) not in done:
                    rows.append({
                        "case": case.name, **case.about, "expected": case.expected, "cache": name,
                        "margin": margin(reader, make(), ids, answer),
                    })  # fmt: skip
                    if args.json:
                        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1))
                progress.advance(task)
    show(rows, [*caches])


def show(rows: list[dict[str, Any]], caches: list[str]) -> None:
    """Cases found, and those lost of what the dense cache finds, by its margin."""
    margins = {name: {row["case"]: row["margin"] for row in rows if row["cache"] == name} for name in caches}
    dense = margins[DENSE]
    found = [case for case in dense if dense[case] > 0]
    groups = {
        f"{low:g} to {high:g} nats" if high else f"over {low:g}": [
            case for case in found if dense[case] > low and (high is None or dense[case] <= high)
        ]
        for low, high in zip(BINS, (*BINS[1:], None), strict=True)
    }
    table = Table(title=f"of {len(dense)} needles, the dense cache finds {len(found)}; lost of these, by its margin")
    table.add_column("cache")
    for name in ("found", "of those", *(f"{name}: {len(group)}" for name, group in groups.items()), "median shift"):
        table.add_column(name, justify="right")
    for name in caches[1:]:
        own = margins[name]
        lost = [str(sum(own[case] <= 0 for case in group)) for group in groups.values()]
        shift = torch.tensor([abs(own[case] - dense[case]) for case in found]).median().item()
        table.add_row(
            name, str(sum(value > 0 for value in own.values())), str(sum(own[case] > 0 for case in found)), *lost,
            f"{shift:.2f}",
        )  # fmt: skip
    to_stdout().print(table)


if __name__ == "__main__":
    main()
