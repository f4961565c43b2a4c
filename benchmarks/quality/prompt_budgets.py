"""Bits of layers by a prompt's first tokens: how well these tell what folding a layer costs, and what it is worth.

Of a passage's first 256 tokens each layer's keys, and its values, are folded into 2 bits, and some of the queries
attend with and without (`kvfold/cache/prompt_costs.py`): once with all folded tokens wrong, once with those only that
a cache would not hold dense then. Printed: how the logarithms of these costs correlate with those of the losses that
`kvfold calibrate` measures by KL, and the variance of ln(cost) that says nothing about losses, which
`kvfold.cache.budgets.NOISE` stands for; each side's cost beside its loss; and the KL of whole passages at the same
memory, with

    alike     as many bits for all layers
    turn      bits by the prompt, layer after layer, as FoldedCache gives them by itself: equal ones, where fewer than
              `kvfold.cache.budgets.FEWEST` layers fold
    at once   the same costs, all known before the first layer is decided
    others    as "turn", by the first tokens of the three other texts; their mean
    losses    by the calibration's losses

    python benchmarks/quality/prompt_budgets.py [--model gemma3-270m] [--passage 2048] [--formats kvfold-3]
"""

import argparse
import json
import statistics
import sys
from math import exp, log
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold.cache import budgets
from kvfold.cache.budgets import Item, PromptBudgets, Stream, shrunk, spread, with_bits
from kvfold.cache.calibration import Loss
from kvfold.cli.output import to_stdout
from kvfold.evaluate import FidelityMeter, read_in_lockstep, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats import FIT_TOKENS, Window
from kvfold.integrations.text import text_sha256
from kvfold.integrations.transformers.layer import FoldedLayer

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models
from texts import texts

Costs = dict[Stream, float]

BY = ("alike", "turn", "at once", "others", "losses")


def costs_of(model: PreTrainedModel, ids: Tensor, window: Window | None = None) -> Costs:
    """What folding each layer's sides costs by the first tokens of `ids`, as a cache finds it."""
    with patch.object(budgets, "FEWEST", 1):  # costs are asked for of models, too, that keep equal bits
        cache = kvfold.FoldedCache(model.config, policy=kvfold.Policy("kvfold-4", window=window))
    model(ids[:, :FIT_TOKENS], past_key_values=cache, logits_to_keep=1)
    first = next(layer for layer in cache.layers if isinstance(layer, FoldedLayer))
    (shares,) = first.folded.config.budgets.shares.values()
    return {Stream(layer, n): cost for layer, share in shares.items() for n, cost in enumerate(share.costs)}


def by_bits(format: str, bits: dict[Stream, int]) -> kvfold.Policy:
    """A format with bits for each layer."""
    layers = sorted({side.layer for side in bits})
    return kvfold.Policy(
        format, exceptions=[(layer, with_bits(format, {n: bits[Stream(layer, n)] for n in (0, 1)})) for layer in layers]
    )


def in_turn(format: str, costs: Costs) -> kvfold.Policy:
    """Bits as a cache gives them."""
    layers = sorted({side.layer for side in costs})
    given = PromptBudgets(dict.fromkeys(layers, format))
    for layer in layers:
        given.decide(layer, 0, [costs[Stream(layer, n)] for n in (0, 1)], (1, 1))
    return by_bits(format, {side: given.shares[0][side.layer].bits[side.number] for side in costs})


def at_once(format: str, costs: Costs) -> kvfold.Policy:
    """Bits once all costs are known."""
    base = int(format.removeprefix("kvfold-"))
    return by_bits(format, spread({side: Item(base, Loss(cost, 1)) for side, cost in costs.items()}))


def believed(costs: Costs) -> Costs:
    """Costs as far as a cache believes them, once it knows them all."""
    layers = sorted({side.layer for side in costs})
    by_layer = shrunk([[costs[Stream(layer, n)] for n in (0, 1)] for layer in layers])
    return {Stream(layer, n): own[n] for layer, own in zip(layers, by_layer, strict=True) for n in (0, 1)}


def noise(costs: Costs, losses: Costs) -> float:
    """The variance of ln(cost) that says nothing about ln(loss), by its slope on ln(cost)."""
    pairs = [[log(of[side]) for side in losses] for of in (costs, losses)]
    return (1 - statistics.linear_regression(*pairs).slope) * statistics.variance(pairs[0])


def correlation(costs: Costs, losses: Costs) -> float:
    """Of logarithms, over all layers' keys and values."""
    return statistics.correlation(*(torch.tensor([x[side] for side in losses]).log().tolist() for x in (costs, losses)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--formats", default="kvfold-3")
    parser.add_argument("--passage", type=int, default=2048, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=2, help="passages of each text, spread over it")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    model, tokenizer = models.load(args.model)
    kvfold.attach(model)
    calibrated = text_passages(tokenizer, standard_text(), 1024, 4)
    formats, rows = args.formats.split(","), list[dict[str, Any]]()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("losses by KL", total=None)
        measured = kvfold.measure_losses(
            model, calibrated, kvfold.calibrate(model, calibrated),
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )  # fmt: skip
        losses = {Stream(layer, n): loss.kl for layer, pair in measured.losses.items() for n, loss in enumerate(pair)}
        passages = {
            (kind, number): passage
            for kind, text in texts().items()
            for number, passage in enumerate(text_passages(tokenizer, text, args.passage, args.passages))
        }
        costs = {which: costs_of(model, passage) for which, passage in passages.items()}
        all_wrong = {which: costs_of(model, passage, Window(sinks=16)) for which, passage in passages.items()}
        task = progress.add_task("reading", total=len(passages) * args.passage * (1 + 7 * len(formats)))
        for (kind, number), passage in passages.items():
            every, far = all_wrong[kind, number], costs[kind, number]
            policies = {}
            for format in formats:
                policies[f"{format} alike"] = kvfold.Policy(format, budgets=False)
                policies[f"{format} turn"] = kvfold.Policy(format)
                policies[f"{format} at once"] = at_once(format, believed(far))
                for other in texts():
                    if other != kind:
                        policies[f"{format} {other}"] = in_turn(format, costs[other, number])
                policies[f"{format} losses"] = at_once(format, losses)
            caches = {name: kvfold.FoldedCache(model.config, policy=policy) for name, policy in policies.items()}
            meters = {name: FidelityMeter() for name in ("dense", *caches)}
            dense = DynamicCache(config=model.config)
            read_in_lockstep(model, passage, dense, caches, meters, progress=lambda n: progress.advance(task, n))
            for format in formats:
                kl = {
                    name.removeprefix(f"{format} "): meters[name].result().kl_mean for name in caches
                    if name.startswith(f"{format} ")
                }  # fmt: skip
                kl["others"] = statistics.mean(kl.pop(other) for other in texts() if other != kind)
                rows.append({
                    "model": args.model, "kind": kind, "number": number, "text_sha": text_sha256(texts()[kind]),
                    "passage": args.passage, "format": format, "correlation_all": correlation(every, losses),
                    "correlation_far": correlation(far, losses), "noise": noise(far, losses),
                    **{f"kl_{by}": kl[by] for by in BY},
                    **{f"bits_{by}": caches[f"{format} {by}"].bits_per_value() for by in BY if by != "others"},
                    "versions": versions(),
                })  # fmt: skip
    sides = Table(title=f"{args.model}: two bits for one side")
    for column in ("layer", "side", "loss, KL", "cost", "loss/cost, of the mean's"):
        sides.add_column(column, justify="right")
    mean_cost = {side: exp(statistics.mean(log(own[side]) for own in costs.values())) for side in losses}
    ratio = {side: losses[side] / mean_cost[side] for side in losses}
    mean_ratio = exp(statistics.mean(map(log, ratio.values())))
    for side, loss in losses.items():
        name = ("keys", "values")[side.number]
        sides.add_row(str(side.layer), name, f"{loss:.5f}", f"{mean_cost[side]:.5f}", f"{ratio[side] / mean_ratio:.2f}")
    to_stdout().print(sides)
    table = Table(title=f"{args.model}, passages of {args.passage:,} tokens")
    figures = ("corr., all", "corr., far", "noise", "bits", "bits, turn")
    for column in ("text", "format", *figures, *(f"KL, {by}" for by in BY)):
        table.add_column(column, justify="left" if column in ("text", "format") else "right")
    for row in rows:
        correlations = (f"{row[f'correlation_{which}']:.2f}" for which in ("all", "far"))
        bits = (f"{row[f'bits_{by}']:.2f}" for by in ("alike", "turn"))
        kl = (f"{row[f'kl_{by}']:.4f}" for by in BY)
        table.add_row(row["kind"], row["format"], *correlations, f"{row['noise']:.2f}", *bits, *kl)
    to_stdout().print(table)
    for format in formats:
        own = [row for row in rows if row["format"] == format]
        means = {by: statistics.mean(row[f"kl_{by}"] for row in own) for by in BY}
        to_stdout().print(f"{format}: mean KL", ", ".join(f"{by} {mean:.5f}" for by, mean in means.items()))
    if args.json:
        about = {f"{side.layer}.{side.number}": (losses[side], mean_cost[side]) for side in losses}
        args.json.write_text(json.dumps({"sides": about, "rows": rows}, indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
