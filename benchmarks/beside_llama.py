"""What attention over a long context costs a token here and in llama.cpp, side by side on one model.

Both decode the packaged SmolLM2 after 64 tokens and after `--context` tokens of the same text; the difference of the
two is what the context costs, whatever the rest of the engine takes. llama.cpp holds its cache in float16 and in q4_0
(with flash attention, which q4_0 needs), and alternates with kvfold, round by round; kvfold's two contexts take turns,
a token each. Differences are medians of those of single tokens, with quartiles. It runs in an environment of its own:

    python -m venv llama && llama/bin/pip install llama-cpp-python
    python benchmarks/beside_llama.py --python llama/bin/python [--formats kvfold-4] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHORT = 64


def serve(model: str, threads: int, contexts: list[int]) -> None:
    """In llama.cpp's environment: token ids in, as a JSON line, then a line of step times for each line of orders."""
    import llama_cpp

    ids = json.loads(sys.stdin.readline())
    kinds = {"llama.cpp f16": 1, "llama.cpp q4_0": 2}  # as ggml numbers them
    engines = {
        name: llama_cpp.Llama(
            model, n_ctx=max(contexts) + 256, n_batch=512, n_threads=threads, n_threads_batch=threads, type_k=kind,
            type_v=kind, flash_attn=True, verbose=False, logits_all=False,
        )
        for name, kind in kinds.items()
    }  # fmt: skip
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        engine, context = engines[order["name"]], order["context"]
        if order["read"]:
            engine.reset()
            engine.eval(ids[:context])
        times = []
        for t in range(order["steps"]):
            at = engine.n_tokens
            start = time.perf_counter()
            engine.eval([ids[(context + t) % len(ids)]])
            times.append(1e3 * (time.perf_counter() - start))
            assert engine.n_tokens == at + 1
        print(json.dumps(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the interpreter of an environment that has llama-cpp-python")
    parser.add_argument("--formats", default="kvfold-4,kvfold-2")
    parser.add_argument("--context", type=int, default=7_900)
    parser.add_argument("--dtype", default="bfloat16", help="of kvfold's model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="tokens a round and cache")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], int(args.serve[1]), json.loads(args.serve[2]))
    if not args.python:
        parser.error("--python: name the interpreter of an environment that has llama-cpp-python")

    import torch
    from rich.table import Table
    from transformers import DynamicCache

    import kvfold
    from kvfold.cli.output import to_stdout
    from kvfold.evaluate import standard_text
    from kvfold.evaluate.quality import versions
    from kvfold.integrations.models import demo_file

    torch.set_grad_enabled(False)
    torch.set_num_threads(args.threads)
    model, tokenizer = kvfold.demo_model(getattr(torch, args.dtype))
    kvfold.attach(model)
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids
    contexts = [SHORT, args.context]
    names = ["dense", *args.formats.split(",")]
    caches = {
        (name, context): DynamicCache(config=model.config)
        if name == "dense"
        else kvfold.FoldedCache(model.config, name)
        for name in names
        for context in contexts
    }
    for (_, context), cache in caches.items():
        model(ids[:, :context], past_key_values=cache, logits_to_keep=1)
    command = [args.python, __file__, "--serve", str(demo_file()), str(args.threads), json.dumps(contexts)]
    llama = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(what: Any) -> Any:
        assert llama.stdin
        assert llama.stdout
        print(json.dumps(what), file=llama.stdin, flush=True)
        return json.loads(llama.stdout.readline())

    version = ask(ids[0, : args.context + 256].tolist())["version"]
    rivals = ["llama.cpp f16", "llama.cpp q4_0"]
    times: dict[tuple[str, int], list[float]] = {(name, c): [] for name in (*names, *rivals) for c in contexts}
    for context in contexts:  # one engine of llama.cpp holds one context at a time
        for name in rivals:
            ask({"name": name, "context": context, "read": True, "steps": 2})
        for _ in range(args.rounds):
            for _ in range(args.steps):
                for at in caches:  # both contexts, so that no drift of the machine counts as the cost of one
                    start = time.perf_counter()
                    model(ids[:, -1:], past_key_values=caches[at])
                    times[at].append(1e3 * (time.perf_counter() - start))
            for name in rivals:
                times[name, context] += ask(
                    {"name": name, "context": context, "read": False, "steps": args.steps}
                )  # fmt: skip
    llama.kill()
    rows = []
    for name in (*names, *rivals):
        short, long = (statistics.median(times[name, context]) for context in contexts)
        steps = zip(*(times[name, context] for context in contexts), strict=True)
        low, middle, high = statistics.quantiles((long - short for short, long in steps), n=4)
        rows.append({
            "cache": name, "short_ms": short, "long_ms": long, "attention_ms": middle, "quartiles_ms": [low, high],
        })  # fmt: skip
    least = min(row["attention_ms"] for row in rows if row["cache"] in rivals)
    table = Table(title=f"ms a token after {SHORT} and {args.context:,} tokens, {args.threads} threads, {args.dtype}")
    for column in ("cache", f"{SHORT}", f"{args.context:,}", "difference", "llama.cpp's least over it"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in rows:
        row["ratio"] = least / row["attention_ms"]
        table.add_row(
            row["cache"], f"{row['short_ms']:.1f}", f"{row['long_ms']:.1f}",
            "{:.1f} ({:.1f}–{:.1f})".format(row["attention_ms"], *row["quartiles_ms"]), f"{row['ratio']:.1f}×",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "llama_cpp_python": version, "versions": versions()}, indent=2))


if __name__ == "__main__":
    main()
