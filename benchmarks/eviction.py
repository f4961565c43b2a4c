"""What a model still knows after its cache has forgotten half of the tokens, or three quarters, or one.

A model in bfloat16 reads a text into a cache that forgets nothing; copies of it each let one policy act, and go on.
Parts:

  quality   perplexity and KL (beside the cache that forgot nothing) of the text's next tokens, and held memory
  needle    whether a number that stood somewhere in the text is recalled; the question comes after tokens went, so
            that no policy knows it
  long      a long generation under a fixed budget: memory, speed and loops, beside a dense cache; also keep_first = 0
  trigger   time of a trigger beside that of decoding the 128 tokens between two

    python benchmarks/eviction.py [--parts quality,needle] [--length 7900] [--json eviction.json] [--plot eviction.png]
    python benchmarks/eviction.py --model gemma3-270m [--text code]
"""

import argparse
import copy
import json
import platform
import statistics as stats
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

import kvfold
from kvfold import FoldedCache, QueryStatistics, SnapKV, StreamingLLM, TriAttention
from kvfold.cache.report import held_bytes
from kvfold.cli.output import to_stdout
from kvfold.evaluate import split_passages, standard_text
from kvfold.evaluate.behaviour.loops import find_loop
from kvfold.evaluate.behaviour.needle import PLACES
from kvfold.evaluate.passages import opening
from kvfold.eviction import Eviction
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.prompt import prompt_ids

sys.path.append(str(Path(__file__).parent / "quality"))  # texts.py
import models
import texts

PARTS = ("quality", "needle", "long", "trigger")
FORMATS = ("float16", "kvfold-4")
RETENTIONS = (0.75, 0.5, 0.25)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEXT = 500
"""Tokens that the quality part predicts."""
EVERYTHING = SnapKV(budget=2**30, mode="per_layer_per_head")
"""Forgets nothing, and keeps the queries that SnapKV wants to see."""


@dataclass(frozen=True)
class Bench:
    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    ids: Tensor
    queries: QueryStatistics
    length: int

    def passage(self, start: int, tokens: int) -> Tensor:
        """Tokens of the text from `start` on, begun as the tokenizer begins a prompt."""
        return split_passages(self.ids, tokens, 1, [start], opening(self.tokenizer))[0]

    def policies(self) -> dict[str, Callable[[int], Eviction]]:
        """By name, for a budget."""
        series = {"statistics": self.queries}
        own = {"unit": "token", "mode": "per_layer_per_head"}
        return {
            "TriAttention": lambda b: TriAttention(budget=b, **series),
            "TriAttention, paper": lambda b: TriAttention(budget=b, **series, **own),
            "TriAttention, paper, keep_first = 0": lambda b: TriAttention(budget=b, **series, **own, keep_first=0),
            "TriAttention, 8 segments": lambda b: TriAttention(budget=b, **series, **own, keep_first=128, segments=8),
            "StreamingLLM": lambda b: StreamingLLM(budget=b, **own),
            "SnapKV": lambda b: SnapKV(budget=b, **own),
        }

    def plain(self, text: str) -> Tensor:
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids

    def filled(self, ids: Tensor, format: str) -> FoldedCache:
        """A cache that holds a text, read in chunks."""
        cache = FoldedCache(self.model.config, format, eviction=EVERYTHING)
        for part in ids.split(512, 1):
            self.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def evicted(self, cache: FoldedCache) -> Iterator[tuple[str, float, FoldedCache]]:
        """Copies of a cache, each after one policy."""
        for name, make in self.policies().items():
            for retention in RETENTIONS:
                own = copy.deepcopy(cache)
                own.evict(make(int(retention * cache.get_seq_length())))
                forget_queries(own)
                yield name, retention, own


def forget_queries(cache: FoldedCache) -> FoldedCache:
    """The cache without the queries that were kept for SnapKV, which would count as held."""
    cache.evictor = None
    for layer in cache.layers:
        if isinstance(layer, FoldedLayer):
            layer.folded.keeps_queries, layer.folded.newest_queries = 0, None
    return cache


def quality(bench: Bench, format: str, step: Callable[[], None]) -> list[dict[str, Any]]:
    """Figures of one text under all policies."""
    text = bench.passage(min(30_000, bench.ids.shape[1] - bench.length), bench.length)
    cache, more = bench.filled(text[:, :-NEXT], format), text[:, -NEXT:]

    def predict(cache: FoldedCache) -> Tensor:
        return bench.model(more, past_key_values=cache, use_cache=True).logits[0, :-1].float()

    def row(name: str, retention: float, cache: FoldedCache) -> dict[str, Any]:
        report = cache.report()
        logits = predict(cache)
        log_p, log_q = (x.log_softmax(-1) for x in (full, logits))
        step()
        return {
            "part": "quality", "format": format, "policy": name, "retention": retention,
            "ppl": cross_entropy(logits, more[0, 1:]).exp().item(),
            "kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
            "held_bytes": report.held_bytes, "bits_per_value": report.bits_per_value,
        }  # fmt: skip

    full = predict(copy.deepcopy(cache))
    return [row("full", 1.0, forget_queries(copy.deepcopy(cache))), *(row(*one) for one in bench.evicted(cache))]


def needle(
    bench: Bench, format: str, depths: list[float], repeats: int, step: Callable[[], None]
) -> list[dict[str, Any]]:
    """Whether numbers at several depths are recalled."""
    rows = []
    for repeat in range(repeats):
        for number, depth in enumerate(depths):
            place, code = PLACES[(repeat + number) % len(PLACES)], str(48_213 + 1_111 * (number + 5 * repeat))
            sentence, question = (
                bench.plain(f"\n\nThe secret code of the {place} is {code}.\n\n"),
                bench.plain(f"\n\nThe secret code of the {place} is"),
            )
            room = bench.length - sentence.shape[1] - question.shape[1]
            start, at = 11_000 * (repeat * len(depths) + number) % (bench.ids.shape[1] - room), round(depth * room)
            hay, at = bench.passage(start, room), max(at, len(opening(bench.tokenizer)))
            cache = bench.filled(torch.cat((hay[:, :at], sentence, hay[:, at:]), 1), format)

            def recalled(cache: FoldedCache, question: Tensor = question, code: str = code) -> bool:
                said: list[int] = []
                new = question
                for _ in range(8):
                    new = bench.model(new, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                    said.append(int(new))
                step()
                return bench.tokenizer.decode(said).strip().startswith(code)

            about = {"part": "needle", "format": format, "depth": depth, "repeat": repeat}
            full = recalled(copy.deepcopy(cache))
            rows.append({**about, "policy": "full", "retention": 1.0, "recalled": full})
            for name, retention, own in bench.evicted(cache):
                rows.append({**about, "policy": name, "retention": retention, "recalled": recalled(own)})
    return rows


def long(bench: Bench, new_tokens: int, budget: int) -> list[dict[str, Any]]:
    """Long greedy generations."""
    prompt = prompt_ids(bench.tokenizer, "Write a very long story about a lighthouse keeper. Do not stop.")
    config, series = bench.model.config, {"statistics": bench.queries, "budget": budget}
    caches: dict[str, Callable[[], Any]] = {
        "dense": lambda: transformers.DynamicCache(config=config),
        "kvfold-4, TriAttention": lambda: FoldedCache(config, "kvfold-4", eviction=TriAttention(**series)),
        "turboquant-4, keep_first = 0": lambda: FoldedCache(
            config, "turboquant-4", eviction=TriAttention(**series, keep_first=0, unit="token")
        ),
    }
    rows = []
    for name, make in caches.items():
        cache, ids, pieces = make(), prompt, []
        for _ in range(8):
            start, held = time.perf_counter(), ids.shape[1]
            ids = bench.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new_tokens // 8,
                min_new_tokens=new_tokens // 8, do_sample=False, pad_token_id=0,
            )  # fmt: skip
            seconds = time.perf_counter() - start
            whole = cache.held_bytes() if isinstance(cache, FoldedCache) else held_bytes(cache.layers)
            pieces.append({"tokens": ids.shape[1], "held_bytes": whole, "tok_s": (ids.shape[1] - held) / seconds})
        said = ids[0, prompt.shape[1] :].tolist()
        loop = find_loop(said)
        row = {
            "part": "long", "cache": name, "budget": budget, "pieces": pieces,
            "loops_from": None if loop is None else loop.start, "text": bench.tokenizer.decode(said[:400]),
            "end": bench.tokenizer.decode(said[-100:]),
        }  # fmt: skip
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k not in ("text", "pieces")}), file=sys.stderr)
    return rows


def trigger(bench: Bench, budget: int, triggers: int = 6) -> list[dict[str, Any]]:
    """Milliseconds of triggers, and of decoding between them."""
    rows = []
    for format in ("kvfold-4", "turboquant-4", "hadamard-4"):
        policy = TriAttention(budget=budget, statistics=bench.queries)
        cache = FoldedCache(bench.model.config, format, eviction=policy)
        for part in bench.ids[:, : budget + 100].split(512, 1):
            bench.model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert cache.evictor is not None
        evictor, spent, windows = cache.evictor, [], []
        due, act = evictor.due, evictor.act

        def timed_due(layers: Any, due: Callable[..., Any] = due, spent: list[float] = spent) -> Any:
            start = time.perf_counter()
            plan = due(layers)
            if plan is not None:
                spent.append(time.perf_counter() - start)
            return plan

        def timed_act(plan: Any, act: Callable[..., None] = act, spent: list[float] = spent) -> None:
            start = time.perf_counter()
            act(plan)
            spent[-1] += time.perf_counter() - start

        evictor.due, evictor.act = timed_due, timed_act  # type: ignore[method-assign]
        at, begin = budget + 100, time.perf_counter()
        while len(spent) < triggers:
            before = len(spent)
            bench.model(bench.ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            at += 1
            if len(spent) > before:
                windows.append(time.perf_counter() - begin)
                begin = time.perf_counter()
        shares = [own / (window - own) for own, window in zip(spent[1:], windows[1:], strict=True)]
        rows.append({
            "part": "trigger", "format": format, "budget": budget, "trigger_ms": stats.median(spent[1:]) * 1e3,
            "window_ms": stats.median(windows[1:]) * 1e3, "share": stats.median(shares), "shares": shares,
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Tables."""
    grid = [row for row in rows if row["part"] == "needle"]
    depths = sorted({row["depth"] for row in grid})
    table = Table("format", "policy", "kept", "held", "bits", "PPL", "KL", *(f"depth {d:g}" for d in depths))
    base = {row["format"]: row for row in rows if row["part"] == "quality" and row["policy"] == "full"}
    keys = dict.fromkeys((r["format"], r["policy"], r["retention"]) for r in rows if r["part"] in ("quality", "needle"))
    for format, policy, retention in keys:
        own = [r for r in rows if (r.get("format"), r.get("policy"), r.get("retention")) == (format, policy, retention)]
        cells = ["", "", "", ""]
        for r in own:
            if r["part"] == "quality":
                full = base[format]
                cells = [
                    f"{r['held_bytes'] / full['held_bytes']:.1%}", f"{r['bits_per_value']:.2f}",
                    f"{r['ppl'] / full['ppl'] - 1:+.2%}" if policy != "full" else f"{r['ppl']:.2f}", f"{r['kl']:.4f}",
                ]  # fmt: skip
        found = []
        for depth in depths:
            asked = [r["recalled"] for r in grid if r in own and r["depth"] == depth]
            found.append(f"{sum(asked)}/{len(asked)}" if asked else "")
        table.add_row(format, policy, f"{retention:.0%}", *cells, *found)
    if keys:
        console.print(table)
    table = Table("cache", "tokens", "held MB", "tok/s, first eighth", "tok/s, last eighth", "loops from")
    for r in rows:
        if r["part"] == "long":
            first, last = r["pieces"][0], r["pieces"][-1]
            held = f"{first['held_bytes'] / 1e6:.1f} to {last['held_bytes'] / 1e6:.1f}"
            loop = "-" if r["loops_from"] is None else str(r["loops_from"])
            table.add_row(r["cache"], str(last["tokens"]), held, f"{first['tok_s']:.1f}", f"{last['tok_s']:.1f}", loop)
    if table.row_count:
        console.print(table)
    table = Table("format", "trigger ms", "128 tokens, ms", "share, median", "least to most")
    for r in rows:
        if r["part"] == "trigger":
            table.add_row(
                r["format"], f"{r['trigger_ms']:.0f}", f"{r['window_ms']:.0f}", f"{r['share']:.2%}",
                f"{min(r['shares']):.2%} to {max(r['shares']):.2%}",
            )  # fmt: skip
    if table.row_count:
        console.print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """KL and recall over retention."""
    from kvfold.evaluate import plots

    plots.check(path)
    figure = plots.new_figure(9.0, 4.2)
    formats = list(dict.fromkeys(row["format"] for row in rows if row["part"] == "quality"))
    for axis, format in zip(figure.subplots(1, len(formats), sharey=True, squeeze=False)[0], formats, strict=True):
        own = [row for row in rows if row["part"] == "quality" and row["format"] == format and row["policy"] != "full"]
        for policy in dict.fromkeys(row["policy"] for row in own):
            points = sorted((row["retention"], row["kl"]) for row in own if row["policy"] == policy)
            axis.plot(*zip(*points, strict=True), marker="o", label=policy)
        axis.set_title(f"KL to the cache that forgot nothing, {format}", loc="left", fontsize="medium")
        axis.set_xlabel("tokens kept")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    plots.save(figure, path)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--text", choices=("standard", *texts.SOURCES), default="standard", help="that is read")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="of the needle, 0 to 1")
    parser.add_argument("--length", type=int, default=7_900, help="tokens of the text that is read")
    parser.add_argument("--repeats", type=int, default=1, help="needles at each depth")
    parser.add_argument("--new-tokens", type=int, default=4_000, help="of the long generation")
    parser.add_argument(
        "--budget", type=int, default=1_024, help="of the long generation; triggers are timed at twice it"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file, as they come")
    parser.add_argument("--plot", type=Path, help="also plot KL over the share of tokens that are kept")
    args = parser.parse_args()
    parts = args.parts.split(",")
    depths = [float(depth) for depth in args.depths.split(",")]
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {args.parts}: choose from {', '.join(PARTS)}")
    model, tokenizer = kvfold.load_model(models.folder_of(args.model), torch.bfloat16)
    most = model.config.max_position_embeddings
    if not 1_000 <= args.length <= most - 16:
        parser.error(f"--length {args.length}: give 1000 to {most - 16}, as the model takes {most} tokens")
    kvfold.attach(model)
    standard = tokenizer(standard_text(), return_tensors="pt").input_ids
    queries = kvfold.measure_queries(model, split_passages(standard[:, :20_000], 1_024, 4, opening=opening(tokenizer)))
    ids = standard if args.text == "standard" else tokenizer(texts.load(args.text), return_tensors="pt").input_ids
    bench = Bench(model, tokenizer, ids, queries, args.length)
    rows: list[dict[str, Any]] = []
    console = to_stdout()

    def keep(new: list[dict[str, Any]]) -> None:
        rows.extend(new)
        if args.json:
            args.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))

    versions = {
        "kvfold": kvfold.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(), "model": args.model, "text": args.text,
    }  # fmt: skip
    each = 1 + len(bench.policies()) * len(RETENTIONS)
    with Progress(console=Console(stderr=True)) as progress:
        for format in args.formats.split(","):
            if "quality" in parts:
                task = progress.add_task(f"quality, {format}", total=each)
                keep(quality(bench, format, lambda task=task: progress.advance(task)))  # type: ignore[misc]
            if "needle" in parts:
                task = progress.add_task(f"needle, {format}", total=each * len(depths) * args.repeats)
                keep(needle(bench, format, depths, args.repeats, lambda task=task: progress.advance(task)))  # type: ignore[misc]
    if "trigger" in parts:
        keep(trigger(bench, 2 * args.budget))
    if "long" in parts:
        keep(long(bench, args.new_tokens, args.budget))
    show(rows, console)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
