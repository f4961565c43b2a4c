"""The sweep: prove each stage right, then walk down in bits, one variable at a time.

The protocol of sanctum-mlx. Perplexity cannot tell a coarse code from a bug in the code around it. So the ablation
comes first, at bits where every stage is nearly lossless: a sweep over a stage that fails would measure the bug. The
staircase then varies key bits, value bits, page size and residual one after the other, each from where the one before
ended. That takes some twenty runs instead of the grid's hundred.
"""

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.policy import Policy
from kvfold.evaluate.fidelity import Fidelity, FidelityMeter, read_in_lockstep
from kvfold.evaluate.quality import QualityRow, evaluate_formats, versions
from kvfold.evaluate.records import MOST, RUN, Row, append_row, of_bf16, open_rows
from kvfold.evaluate.runtime import Runtime, runtime_of
from kvfold.formats import FAMILIES, NO_RESIDUAL, Window, get_format, get_formats
from kvfold.formats.base import check_page_size
from kvfold.formats.numbers import real, whole
from kvfold.integrations.transformers.shapes import layer_shapes
from kvfold.quant.packing import TILE
from kvfold.quant.residuals import RESIDUALS

Verdict = Literal["pass", "warn", "fail", "invalid"]

FLOAT16 = 16
NEARLY_LOSSLESS = 8
NEGLIGIBLE = 5.0
"""By how many percent a whole cache may be larger than another and count as equally small."""


@dataclass(frozen=True)
class Budgets:
    """How much perplexity may move, up or down: one that falls is no better than one that rises.

    Both limits of "pass" must hold; beyond that of "warn" is "fail".
    """

    pass_abs: float = 0.3
    pass_pct: float = 5.0
    warn_abs: float = 1.0
    lossless_pct: float = 0.5
    """By how many percent a stage of the ablation may change perplexity."""
    lossless_kl: float = 0.005
    """The largest KL(dense ‖ folded) a token, in nats, that a stage of the ablation may have."""

    def __post_init__(self) -> None:
        for each in fields(self):
            real(each.name, getattr(self, each.name), 0, MOST)

    def verdict(self, dense: float, ppl: float) -> Verdict:
        """The verdict on a format's perplexity `ppl`, beside the dense cache's."""
        if not (isfinite(dense) and isfinite(ppl)):
            return "invalid"
        delta = abs(ppl - dense)
        if delta <= self.pass_abs and 100 * delta <= self.pass_pct * dense:
            return "pass"
        return "warn" if delta <= self.warn_abs else "fail"

    def verdict_of_stage(self, dense: float, ppl: float, kl: float) -> Verdict:
        """The verdict on a stage of the ablation, which must change next to nothing."""
        if not (isfinite(dense) and isfinite(ppl) and isfinite(kl)):
            return "invalid"
        same = 100 * abs(ppl - dense) <= self.lossless_pct * dense and kl <= self.lossless_kl
        return "pass" if same else "fail"


@dataclass(frozen=True)
class Config:
    """The formats of a run, all of one family. Bits are those of a code, 16 for float16; a residual's bit is one of the
    keys' bits."""

    family: str
    key_bits: int
    value_bits: int
    page_size: int = 64
    residual: str = "none"

    @property
    def format(self) -> str:
        """The name of the pair."""
        page = "" if self.page_size == 64 else f"@{self.page_size}"
        residual = "" if self.residual == "none" else f"+{self.residual}"
        keys = f"{self._side(self.key_bits)}{residual}{page}"
        values = f"{self._side(self.value_bits)}{page}"
        return keys if keys == values else f"{keys}:{values}"

    def _side(self, bits: int) -> str:
        return "float16" if bits == FLOAT16 else f"{self.family}-{bits}"


@dataclass(frozen=True)
class Stage:
    """One stage of the ablation."""

    name: str
    tests: str
    bug: str
    """What a failure means."""
    config: Config | None
    """None leaves every layer dense."""


def ablation(family: str, residual: str | None = "qjl") -> tuple[Stage, ...]:
    """Stages in order: each adds one thing to what those before it have proven."""
    stages = (
        Stage(
            "identity",
            "the attached model with every layer dense",
            "attaching changes the model before anything is folded: look at the attention function, not at formats",
            None,
        ),
        Stage(
            "bridge",
            "conversion only: tokens go into pages and are read from there as float16, with no codes",
            "the conversion between the model's (batch, heads, tokens, head_dim) tensors and pages is wrong, as when "
            "heads and tokens are swapped or strides ignored. No code was involved, so no choice of bits will mend it",
            Config(family, FLOAT16, FLOAT16),
        ),
        Stage(
            "keys",
            f"{NEARLY_LOSSLESS}-bit keys, float16 values",
            "the keys' rotation, scale, codes or scores are wrong",
            Config(family, NEARLY_LOSSLESS, FLOAT16),
        ),
        Stage(
            "values",
            f"float16 keys, {NEARLY_LOSSLESS}-bit values",
            "the values' rotation, scale, codes or weighted sums are wrong",
            Config(family, FLOAT16, NEARLY_LOSSLESS),
        ),
        Stage(
            "residual off",
            f"{NEARLY_LOSSLESS}-bit keys and values",
            "keys and values are right apart and wrong together",
            Config(family, NEARLY_LOSSLESS, NEARLY_LOSSLESS),
        ),
        Stage(
            "residual on",
            f"the same with one key bit spent on {residual} signs",
            "the residual term is wrong",
            Config(family, NEARLY_LOSSLESS, NEARLY_LOSSLESS, residual=residual or "none"),
        ),
    )
    return stages if residual else stages[:-1]


class StageFailed(ValueError):
    """A stage of the ablation failed: there is a bug, and a sweep would measure it."""


@dataclass(frozen=True)
class Steps:
    """What the staircase tries, one field after the other. Once bits fail, fewer bits are not run.

    Page sizes are tried beside 64, and residuals beside "none". `residuals` None: all that the family takes.
    """

    key_bits: Sequence[int] = (8, 6, 5, 4, 3, 2)
    value_bits: Sequence[int] = (8, 6, 4, 3, 2)
    page_sizes: Sequence[int] = (32, 128)
    residuals: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one number of bits")
            for bits in getattr(self, name):
                whole(name, bits, 1, 8, "bits")
        for size in self.page_sizes:
            check_page_size("page_sizes", size)
        for residual in self.residuals or ():
            if residual not in RESIDUALS:
                raise ValueError(f"residuals = {residual!r}: choose among {', '.join(RESIDUALS)}")


class Sweep:
    """A sweep of one model over passages, (1, T) each, of one text.

    The model is not attached; `run` attaches it, and detaches it at its end. Rows are appended to the JSON-lines file
    `path`, and runs that it holds already are not repeated; `about` tells sweeps in one file apart: model name,
    text_sha, …. `started` is called with stage, format and number of tokens before a run, and with None in the place of
    the number if the file holds its row; `progress` with tokens read.
    """

    def __init__(
        self,
        model: PreTrainedModel | Runtime,
        passages: Sequence[Tensor],
        path: Path,
        about: Row,
        *,
        family: str = "kvfold",
        budgets: Budgets | None = None,
        steps: Steps | None = None,
        started: Callable[[str, str, int | None], None] = lambda stage, format, tokens: None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"family = {family!r}: choose one of {', '.join(FAMILIES)}")
        self.model, self.passages, self.path, self.about = runtime_of(model), passages, path, about
        self.family, self.budgets, self.steps = family, budgets or Budgets(), steps or Steps()
        self.started, self.progress = started, progress
        takes = () if family in NO_RESIDUAL else tuple(RESIDUALS)
        self.residuals = takes if self.steps.residuals is None else tuple(self.steps.residuals)
        if self.residuals and not takes:
            raise ValueError(
                f"residuals = {','.join(self.residuals)!r}: keys of {family!r} take none; leave them out, or choose "
                "another family"
            )
        self.layers = layer_shapes(self.model.config)
        self._check_passages()
        self.n_tokens = sum(ids.shape[1] - 1 for ids in passages)
        self.known = open_rows(path, RUN)

    def _check_passages(self) -> None:
        """Raise if a sweep would fold nothing, or could not fold what was asked for."""
        folded = [layer for layer in self.layers if layer.kind == "full"]
        if not folded:
            raise ValueError(
                "no layer of this model folds (all have windows, latents or states): there is nothing to sweep"
            )
        pair = get_formats(f"{self.family}-4", 64, 64)
        largest = max(64, *self.steps.page_sizes, 0)
        needed = max(pair.window.sinks + largest + pair.window.recent, pair.fit_tokens) + 1
        shortest = min(ids.shape[1] for ids in self.passages)
        if shortest < needed:
            raise ValueError(
                f"passage = {shortest}: no page of the largest size folds in so few tokens; give at least {needed}"
            )
        if self.residuals and any(layer.key_dim % TILE for layer in folded):
            raise ValueError(
                f"residuals = {','.join(self.residuals)!r}: keys of {folded[0].key_dim} channels take none, only "
                f"multiples of {TILE} do; give an empty list"
            )

    def run(self) -> tuple[list[Row], list[Row]]:
        """The ablation's rows, and if all of it holds, those of the staircase."""
        try:
            return self.ablate(), self.descend()
        finally:
            self.model.detach()

    def ablate(self) -> list[Row]:
        """Rows of the ablation."""
        rows = []
        for stage in ablation(self.family, self.residuals[0] if self.residuals else None):
            row = self._measure(f"ablation/{stage.name}", stage.config)
            if row["verdict"] != "pass":
                raise StageFailed(
                    f"the ablation stops at its {stage.name} stage ({stage.tests}): perplexity {row['ppl_fp16']:.3f} "
                    f"became {row['ppl_tq']:.3f}, verdict {row['verdict']}. {stage.bug[0].upper()}{stage.bug[1:]}. "
                    "Nothing is swept over it: mend it and run again, stages that passed are not repeated"
                )
            rows.append(row)
        return rows

    def descend(self) -> list[Row]:
        """Rows of the staircase, each format once."""
        rows: dict[str, Row] = {}

        def step(name: str, configs: Iterable[Config], stop_at_fail: bool = False) -> Config:
            """Run configs; returns the cheapest that passes, or else the one that comes closest."""
            ran = []
            for config in configs:
                row = rows[config.format] = self._measure(name, config)
                ran.append((config, row))
                if row["verdict"] == "invalid":
                    raise StageFailed(
                        f"{config.format} gives a perplexity of {row['ppl_tq']}: a bug, and no measure of its bits. "
                        f"The rows before it are in {self.path}"
                    )
                if stop_at_fail and row["verdict"] == "fail":
                    break
            passed = [(config, row) for config, row in ran if row["verdict"] == "pass"]
            if passed:
                return min(passed, key=lambda each: (each[1]["bits_per_value"], each[1]["kl_mean"]))[0]
            return min(ran, key=lambda each: abs(each[1]["abs_delta"]))[0]

        steps, family = self.steps, self.family
        most = max(steps.value_bits)
        key_bits, value_bits = (sorted(bits, reverse=True) for bits in (steps.key_bits, steps.value_bits))
        best = step("key_bits", [Config(family, bits, most) for bits in key_bits], stop_at_fail=True)
        best = step("value_bits", [replace(best, value_bits=bits) for bits in value_bits], stop_at_fail=True)
        best = step("page_size", [best, *(replace(best, page_size=size) for size in steps.page_sizes)])
        if best.key_bits > 1:
            step("residual", [best, *(replace(best, residual=residual) for residual in self.residuals)])
        return list(rows.values())

    def _measure(self, stage: str, config: Config | None) -> Row:
        """The row of a configuration, from the file if it is there. A stage that failed is measured again."""
        format = "dense" if config is None else config.format
        isolated = stage.startswith("ablation/")
        about = {**self.about, "n_tokens": self.n_tokens}
        described = self._describe(config)
        for row in reversed(self.known):
            if row.get("eval") == about and row.get("config") == described:
                row = {**row, "verdict": self._verdict(row, isolated)}
                if row["verdict"] == "pass" or (not isolated and row["verdict"] != "invalid"):
                    self.started(stage, format, None)
                    return row
        self.started(stage, format, 2 * (self.n_tokens + len(self.passages)))
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        row = {"ts": now, "host": socket.gethostname(), "stage": stage, "config": described, "eval": about}
        row |= self._evaluate(format, config)
        row["verdict"] = self._verdict(row, isolated)
        append_row(self.path, row)
        self.known.append(row)
        return row

    def _verdict(self, row: Row, isolated: bool) -> Verdict:
        dense, ppl = row["ppl_fp16"], row["ppl_tq"]
        if isolated:
            return self.budgets.verdict_of_stage(dense, ppl, row["kl_mean"])
        return self.budgets.verdict(dense, ppl)

    def _policy(self, config: Config | None) -> Policy:
        if config is None:
            return Policy(f"{self.family}-4", exceptions=[(i, "dense") for i in range(len(self.layers))])
        # float16 has no window of its own, so the bridge stage gets that of the family's formats.
        window = get_format(f"{self.family}-4", 64).window
        bare = {config.key_bits, config.value_bits} == {FLOAT16}
        return Policy(config.format, window=window if bare and window != Window() else None)

    def _evaluate(self, format: str, config: Config | None) -> Row:
        if config is None:
            return self._identity()
        self.model.attach()
        policies = {format: self._policy(config)}
        (row,) = evaluate_formats(self.model, self.passages, policies, progress=self.progress)
        return self._figures(row.ppl_dense, row, row.bits_per_value, row.held_bytes, row.seconds_dense)

    def _identity(self) -> Row:
        """The attached model with every layer dense, beside the same model not attached."""
        meters = {"dense": FidelityMeter(), "attached": FidelityMeter()}
        for ids in self.passages:
            cache, dense = self.model.folded_cache(self._policy(None)), self.model.dense_cache()
            run = partial(self._with_or_without, cache)
            read_in_lockstep(run, ids, dense, {"attached": cache}, meters, progress=self.progress)
        before, after, report = meters["dense"].result(), meters["attached"].result(), self.model.report(cache)
        return self._figures(before.ppl, after, report.bits_per_value, report.held_bytes, before.seconds)

    def _with_or_without(self, attached: Any, ids: Tensor, *, past_key_values: Any, **options: Any) -> Any:
        """The model, attached if it reads the cache `attached`."""
        (self.model.attach if past_key_values is attached else self.model.detach)()
        return self.model(ids, past_key_values=past_key_values, **options)

    def _figures(
        self, dense_ppl: float, own: Fidelity | QualityRow, bits: float, held_bytes: int, dense_seconds: float
    ) -> Row:
        delta = own.ppl - dense_ppl
        return {
            "ppl_fp16": dense_ppl,
            "ppl_tq": own.ppl,
            "abs_delta": delta,
            "rel_delta": delta / dense_ppl,
            "runtime_sec": {"fp16": dense_seconds, "tq": own.seconds},
            "kl_mean": own.kl_mean,
            "kl_p99": own.kl_p99,
            "top1": own.top1,
            "bits_per_value": bits,
            "held_bytes": held_bytes,
            "versions": versions(self.model.packages),
        }

    def _describe(self, config: Config | None) -> Row:
        """The fields that sanctum-mlx writes, and ours."""
        head_dim = next((layer.key_dim for layer in self.layers if layer.kind == "full"), None)
        if config is None:
            return {"format": "dense", "family": self.family, "head_dim": head_dim}
        return {
            "format": config.format, **asdict(config), "group_size": head_dim,
            "use_qjl": config.residual == "qjl", "head_dim": head_dim,
        }  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row's stage, format, change of perplexity, the same in percent, KL, `of_bf16`, and verdict, as text."""
    return [
        row["stage"].removeprefix("ablation/"), row["config"]["format"], f"{row['abs_delta']:+.3f}",
        f"{100 * row['rel_delta']:+.2f}", f"{row['kl_mean']:.4f}", of_bf16(row), row["verdict"],
    ]  # fmt: skip


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other row beats in both bits and KL, cheapest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["bits_per_value"], row["kl_mean"])):
        if isfinite(row["kl_mean"]) and (not front or row["kl_mean"] < front[-1]["kl_mean"]):
            front.append(row)
    return front


@dataclass(frozen=True)
class Recommendation:
    """A format, and why."""

    format: str
    reason: str


def recommend(rows: Sequence[Row], budgets: Budgets) -> Recommendation:
    """The format of the staircase with the least KL of those within the budgets whose caches are next to the smallest.

    These are the smallest whole cache, windows and all, and those that hold at most `NEGLIGIBLE` percent more. In a
    model with windows most of a cache does not fold, and few bits save next to nothing.
    """
    limits = f"Δ ≤ {budgets.pass_abs:g} and ≤ {budgets.pass_pct:g} %"
    passed = [row for row in rows if row["verdict"] == "pass"]
    if not passed:
        best = min((row for row in rows if row["verdict"] != "invalid"), key=lambda row: abs(row["abs_delta"]))
        return Recommendation(
            best["config"]["format"],
            f"nothing meets {limits}; this comes closest with ΔPPL {best['abs_delta']:+.3f} "
            f"({100 * best['rel_delta']:+.1f} %)",
        )
    smallest = min(passed, key=lambda row: (row["bits_per_value"], row["kl_mean"]))
    small = [row for row in passed if row["bits_per_value"] <= (1 + NEGLIGIBLE / 100) * smallest["bits_per_value"]]
    best = min(small, key=lambda row: (row["kl_mean"], row["bits_per_value"]))
    tokens = best["eval"].get("passage", best["eval"]["n_tokens"])
    why = "its cache is the smallest"
    if best is not smallest:
        why = (
            f"it has the least loss of the {len(small)} whose caches are at most {NEGLIGIBLE:g} % larger than the "
            f"smallest, {smallest['config']['format']}'s ({of_bf16(smallest)}, KL {smallest['kl_mean']:.4f})"
        )
    reason = (
        f"of the {len(passed)} that meet {limits}, {why}: {of_bf16(best)} of a dense bfloat16 cache after {tokens:,} "
        f"tokens, ΔPPL {best['abs_delta']:+.3f} ({100 * best['rel_delta']:+.1f} %), KL {best['kl_mean']:.4f}"
    )
    cheaper = [row for row in rows if row["bits_per_value"] < smallest["bits_per_value"]]
    if cheaper:
        nearest = max(cheaper, key=lambda row: row["bits_per_value"])
        reason += (
            f". The next cheaper, {nearest['config']['format']} with {of_bf16(nearest)}, is a {nearest['verdict']} "
            f"with ΔPPL {nearest['abs_delta']:+.3f}"
        )
    return Recommendation(best["config"]["format"], reason)
