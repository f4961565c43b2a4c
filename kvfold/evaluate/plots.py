"""Plots of results, as matplotlib figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cache.files.paths import AnyPath, check_output, replacing
from kvfold.evaluate.records import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvfold.evaluate.speed import SpeedRow

GRAY = "#808080"
"""Reads on white and on black."""
SUFFIXES = (".png", ".svg", ".pdf")
CROWD = 8
"""With more points than this, only those of the front are labelled."""


def new_figure(width: float = 5.0, height: float = 3.6, **layout: Any) -> "Figure":
    """An empty figure; says how to install matplotlib if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: install kvfold[plots]") from None
    return Figure(figsize=(width, height), layout="constrained", **layout)


def check(path: Path | None, inputs: Sequence[AnyPath | None] = ()) -> None:
    """Raise, before long work rather than after it, if no plot can be written to `path` (`files.check_output`)."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise ValueError(f"plot = {str(path)!r}: give a file that ends in {', '.join(SUFFIXES)}")
    new_figure()
    check_output(path, "plot", inputs)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the suffix (.png, .svg, .pdf) says how."""
    with replacing(path, "plot") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."), dpi=150)


def speed(rows: Sequence["SpeedRow"]) -> "Figure":
    """Decoding rate and held memory over contexts, a line a cache."""
    figure = new_figure(9.0, 3.6)
    rate, memory = figure.subplots(1, 2)
    for name in dict.fromkeys(row.format for row in rows):
        own = [row for row in rows if row.format == name]
        contexts = [row.context for row in own]
        rate.plot(contexts, [row.decode_tok_s for row in own], marker="o", label=name)
        memory.plot(contexts, [row.held_bytes / 1e6 for row in own], marker="o", label=name)
    for axis, title in ((rate, "decoding, tokens a second"), (memory, "held by the cache, MB")):
        axis.set_title(title, loc="left", fontsize="medium")
        axis.set_xlabel("context, tokens")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    rate.legend(frameon=False)
    return figure


def needle_grid(rows: Sequence[Row]) -> "Figure":
    """Share of needles found, by length and depth, from outcomes of the needle task; dense first, then each format."""
    formats = list(dict.fromkeys(row["format"] for row in rows))
    lengths = sorted({row["about"]["length"] for row in rows})
    depths = sorted({row["about"]["depth"] for row in rows})
    figure = new_figure(1.2 + 2.6 * len(formats), 1.2 + 0.45 * len(depths))
    axes = figure.subplots(1, len(formats), squeeze=False, sharey=True)[0]
    for axis, format in zip(axes, formats, strict=True):
        grid = [
            [
                _mean(
                    row["score"]
                    for row in rows
                    if row["format"] == format and (row["about"]["length"], row["about"]["depth"]) == (length, depth)
                )
                for length in lengths
            ]
            for depth in depths
        ]
        axis.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for y, line in enumerate(grid):
            for x, share in enumerate(line):
                axis.text(x, y, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color="black")
        axis.set_title(format, fontsize=10)
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
        axis.set_xlabel("tokens", fontsize=9)
    axes[0].set_ylabel("depth", fontsize=9)
    figure.suptitle("needles found, %", fontsize=10)
    return figure


def pareto_plot(rows: Sequence[Row], front: Sequence[Row]) -> "Figure":
    """Held bits a value against KL, each format a point, and the `front` of those that no other beats.

    The rate–distortion bound of a Gaussian source is 4^−b of the vectors' energy. KL follows the error's power, so the
    bound is scaled by KL / NMSE of the row with the largest loss; without layer errors no bound is drawn.
    """
    figure = new_figure()
    axis = figure.subplots()
    shown = [row for row in rows if row["kl_mean"] > 0]
    axis.scatter([r["bits_per_value"] for r in shown], [r["kl_mean"] for r in shown], color="#d95f02", zorder=3)
    for row in shown if len(shown) <= CROWD else [row for row in front if row["kl_mean"] > 0]:
        axis.annotate(
            row["format"], (row["bits_per_value"], row["kl_mean"]), (5, 4), textcoords="offset points", fontsize=8
        )
    line = sorted((row["bits_per_value"], row["kl_mean"]) for row in front if row["kl_mean"] > 0)
    axis.plot([x for x, _ in line], [y for _, y in line], color="#d95f02", lw=1, label="Pareto front")
    anchor = max((row for row in shown if row.get("key_error")), key=lambda row: row["kl_mean"], default=None)
    if anchor is not None:
        errors = [e for e in (*anchor["key_error"], *(anchor.get("value_error") or ())) if e is not None and e == e]
    if anchor is not None and _mean(errors) > 0:
        factor = anchor["kl_mean"] / _mean(errors)
        bits = [b / 10 for b in range(10, 91)]
        axis.plot(
            bits, [factor * 4**-b for b in bits], "--", color=GRAY, lw=1,
            label=f"bound 4^−b, by the loss of {anchor['format']}",
        )  # fmt: skip
    axis.set_yscale("log")
    low = min((r["kl_mean"] for r in shown), default=1e-3)
    axis.set_ylim(low / 4)
    axis.set_xlabel("held bits a value")
    axis.set_ylabel("KL(dense ‖ folded) a token, nats")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def layer_errors(row: Row) -> "Figure":
    """Share of each layer's key and value energy that folding loses, as a heat map."""
    keys, values = ([float("nan") if e is None else e for e in row[name]] for name in ("key_error", "value_error"))
    figure = new_figure(5.0, 1.4)
    axis = figure.subplots()
    image = axis.imshow([keys, values], cmap="viridis", aspect="auto", vmin=0)
    axis.set_yticks([0, 1], ["keys", "values"], fontsize=8)
    axis.set_xlabel("layer", fontsize=9)
    axis.set_title(row["format"], fontsize=10)
    bar = figure.colorbar(image, ax=axis, format=lambda share, _: f"{100 * share:.2g} %")
    bar.ax.tick_params(labelsize=8)
    return figure


def memory_by_context(contexts: Sequence[int], held: Mapping[str, Sequence[int]], memory: int) -> "Figure":
    """Held bytes against context, one line a format, and the memory that there is."""
    figure = new_figure()
    axis = figure.subplots()
    for name, values in held.items():
        axis.plot(contexts, [value / 1e9 for value in values], marker=".", label=name)
    axis.axhline(memory / 1e9, color=GRAY, ls="--", lw=1, label="memory")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(contexts, [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts], fontsize=8)
    axis.set_xlabel("tokens")
    axis.set_ylabel("GB of one sequence")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")
