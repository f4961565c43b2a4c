"""What each ingredient of kvfold's formats is worth, alone and together, on the heads of a real model.

Codecs are compared by themselves: every token but the first 16 is folded before any query reads it, the newest ones
too, and only keys or only values are folded, so that figures do not mix. No cache works so (`kvfold eval` and
`kinds.py` measure what caches do), but most published figures were taken like this. Statistics are those of a
passage's first 256 tokens. The last table goes through the real cache: what the dense window is worth.

Passages of 1,024 tokens of the language reference in Python's library.

    python benchmarks/quality/ingredients.py [--model gemma3-270m] [--offsets 0,30000] [--bits 3,2] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvfold
from kvfold.cli.output import to_stdout
from kvfold.evaluate import evaluate_formats, standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.formats import FIT_TOKENS, KeyStatistics, Window
from kvfold.formats.channelwise import spread_bits
from kvfold.formats.page import level_table
from kvfold.integrations.text import text_sha256
from kvfold.quant import scales
from kvfold.quant.affine import closest_affine
from kvfold.quant.codebooks import flat_levels, gaussian_levels
from kvfold.quant.nearest import nearest_level
from kvfold.quant.packing import Lanes
from kvfold.quant.spectral import spectral_rotation
from kvfold.quant.transforms import orthogonal

sys.path.append(str(Path(__file__).parents[1]))  # models.py
import models

PASSAGE, SINKS, PAGE = 1_024, 16, 64
TRELLIS = {2: 0.0771, 3: 0.0201, 4: 0.00525}
"""Distortion of a unit Gaussian by bitshift trellis codes of 256, 512 and 1,024 states (simulated, not built)."""

Codec = Callable[[Tensor, Tensor], Tensor]
"""(x, queries) to x̂: x is (heads, T, D), queries (heads, all that read them, D)."""


def named(name: str, x: Tensor, q: Tensor, *, lanes: Lanes = "tokens") -> Tensor:
    """A format of the package, fitted if it is one that is; as it folds keys, or values ("channels")."""
    fmt = kvfold.get_format(name, x.shape[-1], lanes=lanes)
    if fmt.awaits_fit:
        fmt = fmt.fitted(_statistics(x, q))
    return fmt.unfold(fmt.fold(x))


def oscar_keys(bits: int, x: Tensor, q: Tensor) -> Tensor:
    """OSCAR's codes of keys, with rotations by the very queries that will read them, which is more than it can have."""
    fmt = kvfold.get_format(f"oscar-{bits}", x.shape[-1])
    fmt = fmt.with_fit_tables({"rotation": spectral_rotation(q.mT @ q)})
    return fmt.unfold(fmt.fold(x))


def _statistics(x: Tensor, q: Tensor) -> KeyStatistics:
    repeat = q.shape[1] // x.shape[1]
    first = FIT_TOKENS - SINKS
    return KeyStatistics.of(x[:, :first], q[:, : first * repeat].square(), PAGE)


def per_channel(
    mean: int, x: Tensor, q: Tensor, *, flat: bool = False, tried: int = 1, middle: bool = False,
    order: bool = False, klt: str | None = None, spread: bool = False, parts: int | None = None, by_layer: bool = False,
) -> Tensor:  # fmt: skip
    """A centre and a scale for each channel of a page, with more or less of what `Channelwise` does.

    flat: levels of `flat_levels` in the place of the Gaussian's; tried: scales tried; middle: the middle of the range
    tried as a centre; order: channels by importance; klt: coordinates in which keys are uncorrelated and errors weigh
    alike, U of W·Σ_k·W with W = Σ_q^½ ("plain": W = 1); spread: more bits for the first channels, with the same mean,
    in `parts` equal parts; by_layer: bits spread as this layer's importance asks.
    """
    groups = x.shape[-1] // 16
    bits = spread_bits(mean, groups, parts) if spread else (mean,) * groups
    forth = back = torch.eye(x.shape[-1]).expand(x.shape[0], -1, -1)
    if klt:
        first = FIT_TOKENS - SINKS
        pages = x[:, : first // PAGE * PAGE].unflatten(1, (-1, PAGE))
        centred = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
        own = q[:, : first * (q.shape[1] // x.shape[1])]
        sigma_k, sigma_q = (s.mT @ s / s.shape[1] for s in (centred, own))
        energy, axes = torch.linalg.eigh(torch.eye(x.shape[-1]).expand_as(sigma_q) if klt == "plain" else sigma_q)
        root = energy.clamp_min(1e-4 * energy.mean()).sqrt()
        weigh = axes @ torch.diag_embed(root) @ axes.mT
        u = torch.linalg.eigh(weigh @ sigma_k @ weigh)[1].flip(-1)
        forth, back = u.mT @ weigh, axes @ torch.diag_embed(1 / root) @ axes.mT @ u
    elif order:
        rows = _statistics(x, q).order().long()
        forth = torch.eye(x.shape[-1])[rows]
        back = forth.mT
        if by_layer:
            importance = _statistics(x, q).importance.sort(-1, descending=True)[0]
            bits = water_level((importance / importance.sum(-1, keepdim=True)).mean(0), sum(bits))
    y = (x @ forth.mT).unflatten(1, (-1, PAGE)).flatten(0, 1)
    levels = flat_levels if flat else gaussian_levels
    lut = level_table({b: levels(b) for b in set(bits)}, bits)
    tops = torch.tensor([levels(b)[-1] for b in bits]).repeat_interleave(16)
    low, high, average = y.amin(1, keepdim=True), y.amax(1, keepdim=True), y.mean(1, keepdim=True)
    z = (torch.cat((average, (low + high) / 2), 1) if middle else average).half().float()
    deviation = (y.var(1, keepdim=True, correction=0) + (z - average).square()).sqrt()
    reach = torch.maximum(torch.maximum(high - z, z - low) / tops, deviation)
    s = torch.stack([deviation.lerp(reach, step / max(tried - 1, 1)) for step in range(tried)], 2).flatten(1, 2)
    s, z = s.half().float(), z.repeat_interleave(tried, 1)
    code, chosen = closest_affine(y, z, s, lut, bits)
    index = chosen.long().unsqueeze(1)
    level = lut[torch.arange(y.shape[-1]) // 16, code.long()]
    y = z.take_along_dim(index, 1) + s.take_along_dim(index, 1) * level
    return y.unflatten(0, (x.shape[0], -1)).flatten(1, 2) @ back.mT


def water_level(importance: Tensor, total: int) -> tuple[int, ...]:
    """Bits of each group of 16 channels, at least 1, given one by one to where they lessen the error most."""
    groups = importance.unflatten(0, (-1, 16)).sum(-1).tolist()
    bits = [1] * len(groups)
    for _ in range(total - len(bits)):
        bits[max((g for g in range(len(bits)) if bits[g] < 8), key=lambda g: groups[g] * 4.0 ** -bits[g])] += 1
    return tuple(bits)


def rotated(bits: int, rule: str, x: Tensor, q: Tensor, *, centred: bool = False) -> Tensor:
    """Hadamard codes with a scale rule of `kvfold.quant.scales`, or "trellis" for its simulated noise."""
    hadamard = orthogonal("hadamard", x.shape[-1])
    y = hadamard.apply(x).unflatten(1, (-1, PAGE))
    centre = y.mean(2, keepdim=True).half().float() if centred else torch.zeros(1)
    y = y - centre
    rms = y.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
    if rule == "trellis":
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        y = y + rms * TRELLIS[bits] ** 0.5 * noise
    else:
        _, level = nearest_level(y / rms, torch.tensor(gaussian_levels(bits)))
        y = scales.SCALE_RULES[rule](y, level).half().float().unsqueeze(-1) * level if rule != "raw" else rms * level
    return hadamard.invert((y + centre).flatten(1, 2))


def key_rows(bits: int) -> dict[str, Codec]:
    """Keys: each row adds to the one before, from the first that has channels on."""
    rows: dict[str, Codec] = {
        "TurboQuant": partial(named, f"turboquant-{bits}"),
        "Hadamard, unbiased scales": partial(named, f"hadamard-{bits}"),
        "… around page centres": partial(named, f"centred-{bits}"),
        "scale a channel and page": partial(per_channel, bits),
        "+ best of 8 scales": partial(per_channel, bits, tried=8),
        "+ flat levels": partial(per_channel, bits, tried=8, flat=True),
        "+ best of 2 centres": partial(per_channel, bits, tried=8, flat=True, middle=True),
        "+ bits by importance (kvfold)": partial(named, f"kvfold-{bits}"),
        "KVarN": partial(named, f"kvarn-{bits}"),
        "OSCAR, rotated by this text's queries": partial(oscar_keys, bits),
        "bits in four parts, the rest as kvfold": partial(
            per_channel, bits, tried=8, flat=True, middle=True, order=True, spread=True, parts=4
        ),
        "bits by importance, nothing else": partial(per_channel, bits, order=True, spread=True),
        "query-weighted KLT, the rest as kvfold": partial(
            per_channel, bits, tried=8, flat=True, middle=True, klt="weighted", spread=True
        ),
        "bits as each layer asks, the rest as kvfold": partial(
            per_channel, bits, tried=8, flat=True, middle=True, order=True, spread=True, by_layer=True
        ),
    }
    if bits > 1:
        rows |= {
            f"centred, one bit for {name}": partial(named, f"centred-{bits}+{name}") for name in ("qjl", "srht", "sign")
        }
    return rows


def value_rows(bits: int) -> dict[str, Codec]:
    """Values: one thing changed at a time."""
    return {
        "TurboQuant": partial(named, f"turboquant-{bits}"),
        "Hadamard, least-squares scale": partial(rotated, bits, "least_squares"),
        "Hadamard, exact norms": partial(rotated, bits, "matched"),
        "Hadamard, EDEN scale (kvfold)": partial(named, f"hadamard-{bits}"),
        "… around page centres (+.25 bits)": partial(named, f"centred-{bits}"),
        "KVarN (+.5 bits)": partial(named, f"kvarn-{bits}", lanes="channels"),
        "scale a channel and page": partial(per_channel, bits, tried=8, flat=True, middle=True),
        "KLT, more bits for larger variance": partial(
            per_channel, bits, tried=8, flat=True, middle=True, klt="plain", spread=True
        ),
        "trellis code (simulated)": partial(rotated, bits, "trellis"),
    }


@dataclass
class Folding:
    """What the attention function below folds; None leaves a side dense."""

    keys: Codec | None = None
    values: Codec | None = None


FOLDING = Folding()


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    """Causal attention over keys and values that went through `FOLDING`, in layers that attend to everything."""
    if getattr(module, "sliding_window", None):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    repeat, whole = query.shape[1] // key.shape[1], (key.shape[2] - SINKS) // PAGE * PAGE
    folded = slice(SINKS, SINKS + whole)
    for x, codec in ((key, FOLDING.keys), (value, FOLDING.values)):
        for row in range(x.shape[0] if codec else 0):
            q = query[row, :, folded].unflatten(0, (-1, repeat)).transpose(1, 2).flatten(1, 2)
            x[row, :, folded] = codec(x[row, :, folded].clone(), q)  # type: ignore[misc]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("folding", attention)
AttentionMaskInterface.register("folding", sdpa_mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--offsets", default="0,30000", help="where passages start, in tokens")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    all_bits = [int(bits) for bits in args.bits.split(",")]

    model, tokenizer = models.load(args.model)
    text = standard_text()
    passages = text_passages(tokenizer, text, PASSAGE, 1, [int(offset) for offset in args.offsets.split(",")])
    batch = torch.cat(passages)
    own = model.config._attn_implementation
    model.set_attn_implementation("folding")

    def log_p() -> Tensor:
        return model(batch, use_cache=False).logits.log_softmax(-1)

    def ppl(log_q: Tensor) -> float:
        return exp(-log_q[:, :-1].gather(-1, batch[:, 1:, None]).mean())

    dense = log_p()
    plans = [(side, bits, name, codec) for bits in all_bits for side, table in
             (("keys", key_rows(bits)), ("values", value_rows(bits))) for name, codec in table.items()]  # fmt: skip
    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as progress:
        for side, bits, name, codec in progress.track(plans, description="codecs"):
            FOLDING.keys, FOLDING.values = (codec, None) if side == "keys" else (None, codec)
            log_q = log_p()
            kl = (dense.exp() * (dense - log_q)).sum(-1).mean().item()
            delta = 100 * (ppl(log_q) / ppl(dense) - 1)
            rows.append({"side": side, "bits": bits, "name": name, "kl_mean": kl, "delta_ppl_pct": delta})
        model.set_attn_implementation(own)
        kvfold.attach(model)
        policies = {
            f"kvfold-{bits}, {recent} newest dense": kvfold.Policy(
                f"kvfold-{bits}", window=Window(SINKS, recent, 0), budgets=False
            )
            for bits in all_bits
            for recent in (0, 8, 24, 48, 96)
        }
        task = progress.add_task("windows", total=(1 + len(policies)) * batch.numel())
        cached = evaluate_formats(model, passages, policies, progress=lambda n: progress.advance(task, n))
    rows += [
        {"side": "cache", "bits": int(row.format[7]), "name": row.format, "kl_mean": row.kl_mean,
         "delta_ppl_pct": row.delta_ppl_pct}
        for row in cached
    ]  # fmt: skip
    for side in ("keys", "values", "cache"):
        table = Table(title=f"{side}, {args.model}, dense PPL {ppl(dense):.3f}")
        table.add_column("codec")
        for bits in all_bits:
            table.add_column(f"KL, {bits} bits", justify="right")
            table.add_column("ΔPPL", justify="right")
        names = dict.fromkeys(row["name"] for row in rows if row["side"] == side)
        for name in names:
            cells = []
            for bits in all_bits:
                own_row = next((r for r in rows if (r["side"], r["bits"], r["name"]) == (side, bits, name)), None)
                cells += (
                    ["", ""] if own_row is None else [f"{own_row['kl_mean']:.4f}", f"{own_row['delta_ppl_pct']:+.2f} %"]
                )
            table.add_row(name, *cells)
        to_stdout().print(table)
    if args.json:
        about = {"text_sha": text_sha256(text), "offsets": args.offsets, "versions": versions()}
        args.json.write_text(json.dumps([about | row for row in rows], indent=2))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
