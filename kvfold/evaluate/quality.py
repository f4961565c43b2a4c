"""`kvfold eval`: what each format costs a model, on a text, through the real cache and attention."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cache.report import DERIVED
from kvfold.evaluate.fidelity import FidelityMeter, read_in_lockstep
from kvfold.evaluate.runtime import Compared, Runtime, runtime_of


@dataclass(frozen=True)
class QualityRow:
    """One format's figures.

    Attributes
    ----------
    format
        Its name.
    n_tokens
        Predicted tokens, over all passages.
    ppl_dense, ppl, delta_ppl, delta_ppl_pct
        Perplexity with a dense cache and with this one; the difference, and in percent.
    kl_mean, kl_p99, top1
        As in `Fidelity`.
    folded_bits_per_value, bits_per_value, dense_share, ratio_to_bf16, held_bytes
        What the cache held at the end of the last passage, everything counted, as in `CacheReport`: bits of the layers
        that fold, bits over all layers, the share that was not folded, how many times smaller the whole is than a dense
        bfloat16 cache of the same model, and bytes.
    key_error, value_error
        For each layer, ‖x − x̂‖²/‖x‖² of the dense cache's own keys and values when folded: the codec's
        error alone, without what earlier layers' errors do to later ones. NaN for layers that stay dense.
    seconds, seconds_dense
        Time that reading with this cache took, and with the dense one.
    packages
        Packages whose versions the figures depend on, beside kvfold.
    """

    format: str
    n_tokens: int
    ppl_dense: float
    ppl: float
    delta_ppl: float
    delta_ppl_pct: float
    kl_mean: float
    kl_p99: float
    top1: float
    folded_bits_per_value: float
    bits_per_value: float
    dense_share: float
    ratio_to_bf16: float
    held_bytes: int
    key_error: tuple[float, ...]
    value_error: tuple[float, ...]
    seconds: float
    seconds_dense: float
    packages: tuple[str, ...]

    def to_json(self, **about: Any) -> dict[str, Any]:
        """A plain dict, with `about` (model, text, …) and the versions in use."""
        row = about | asdict(self) | {"versions": versions(self.packages)}
        del row["packages"]
        return row


def versions(packages: Sequence[str] = ("torch", "transformers")) -> dict[str, str]:
    """Versions that a figure depends on."""
    from importlib.metadata import version

    return {
        **{name: version(name) for name in ("kvfold", *packages)},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


@torch.no_grad()
def evaluate_formats(
    model: PreTrainedModel | Runtime,
    passages: Sequence[Tensor],
    formats: Sequence[str] | Mapping[str, Policy],
    *,
    chunk: int = 256,
    calibration: Calibration | None = None,
    progress: Callable[[int], None] = lambda tokens: None,
) -> list[QualityRow]:
    """Read each passage with a fresh cache of each format, and a dense one beside.

    Parameters
    ----------
    model
        An attached model of transformers, or a runtime.
    passages
        Tokens, (1, T) each.
    formats
        Names, or keys:values; or policies by any name.
    chunk
        Tokens of one forward pass; folded caches read the same whatever it is.
    calibration
        Statistics for formats that are fitted, instead of those of each passage's first tokens.
    progress
        Called with numbers of tokens read that add up to the passages' total times 1 + len(formats).
    """
    policies = formats if isinstance(formats, Mapping) else {name: Policy(name) for name in formats}
    meters = {name: FidelityMeter() for name in ["dense", *formats]}
    errors: dict[str, list[tuple[list[float], list[float]]]] = {name: [] for name in formats}
    runtime, folded = runtime_of(model), dict[str, Any]()
    for ids in passages:
        dense = runtime.dense_cache()
        folded = {name: runtime.folded_cache(policy, calibration) for name, policy in policies.items()}
        read_in_lockstep(runtime, ids, dense, folded, meters, chunk=chunk, progress=progress)
        for name, cache in folded.items():
            errors[name].append(codec_errors(runtime.compared(dense, cache)))
    reference = meters["dense"].result()
    rows = []
    for name, cache in folded.items():
        result, report = meters[name].result(), runtime.report(cache)
        key_error, value_error = (
            tuple(torch.tensor([part[side] for part in errors[name]]).mean(0).tolist()) for side in (0, 1)
        )
        rows.append(
            QualityRow(
                format=name,
                n_tokens=result.tokens,
                ppl_dense=reference.ppl,
                ppl=result.ppl,
                delta_ppl=result.ppl - reference.ppl,
                delta_ppl_pct=100 * (result.ppl / reference.ppl - 1),
                kl_mean=result.kl_mean,
                kl_p99=result.kl_p99,
                top1=result.top1,
                **{figure: getattr(report, figure) for figure in DERIVED},
                held_bytes=report.held_bytes,
                key_error=key_error,
                value_error=value_error,
                seconds=result.seconds,
                seconds_dense=reference.seconds,
                packages=runtime.packages,
            )
        )
    return rows


def codec_errors(layers: Iterable[Compared | None]) -> tuple[list[float], list[float]]:
    """‖x − x̂‖²/‖x‖² of each layer's dense keys and values under its formats, sinks left out; NaN for dense layers."""
    errors: tuple[list[float], list[float]] = ([], [])
    for layer in layers:
        if layer is None or layer[0].awaits_fit:  # dense, or nothing folded
            for side in errors:
                side.append(nan)
            continue
        pair, keys, values = layer
        sides = [(0, pair.keys, keys), (1, pair.values, values)]
        if pair.shares_pages:  # a latent and its rotary part, in the place of keys and values
            errors[1].append(nan)
            sides = sides[:1]
        for at, fmt, x in sides:
            x = x[:, :, pair.window.sinks :].float()
            error = (fmt.unfold(fmt.fold(x)) - x).square().sum() / x.square().sum()
            errors[at].append(error.item())
    return errors
