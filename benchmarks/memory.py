"""Peak process memory of a long generate, dense against folded, each in a process of its own.

SmolLM2 in bfloat16 reads `--rows` copies of the standard library's text of `--context` tokens each, in chunks, and
answers with `--new` tokens. Peak is the process's highest resident set (VmHWM, reset once the model is loaded and has
run), and what that is above the resident set before: what the cache and attention added. Linux only.

    python benchmarks/memory.py [--context 7900] [--rows 4] [--caches dense,kvfold-4] [--json FILE]
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import kvfold
from kvfold.cache.report import held_bytes
from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text


def status(field: str) -> int:
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


@torch.no_grad()
def measure(name: str, context: int, rows: int, new: int) -> dict[str, object]:
    """Memory and time of one cache, in this process."""
    model, tokenizer = kvfold.demo_model(torch.bfloat16)
    kvfold.attach(model)
    ids = tokenizer(standard_text(), return_tensors="pt").input_ids[:, :context].repeat(rows, 1)
    model(ids[:, :256], logits_to_keep=1)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident set starts again from the present one
    before = status("VmRSS")
    dense = name == "dense"
    cache = transformers.DynamicCache(config=model.config) if dense else kvfold.FoldedCache(model.config, name)
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, min_new_tokens=new,
        do_sample=False, prefill_chunk_size=256, pad_token_id=0,
    )  # fmt: skip
    assert out.shape[1] == context + new
    return {
        "cache": name, "context": context, "rows": rows, "new_tokens": new, "held_bytes": held_bytes(cache.layers),
        "peak_added_bytes": status("VmHWM") - before, "peak_bytes": status("VmHWM"),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=7_900)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--caches", default="dense,kvfold-4,turboquant-4")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.context, args.rows, args.new)))
        return
    kvfold.demo_model()  # so that no measured process converts it
    results = []
    console = Console(stderr=True)
    for name in args.caches.split(","):
        with console.status(f"{args.rows} x {args.context} tokens with {name}"):
            command = [sys.executable, __file__, "--one", name, "--context", args.context, "--rows", args.rows]
            run = subprocess.run(
                [*map(str, command), "--new", str(args.new)], check=True, capture_output=True, text=True
            )
        results.append(json.loads(run.stdout))
    table = Table(title=f"{args.rows} rows of {args.context:,} tokens, SmolLM2-135M in bfloat16")
    for column in ("cache", "held MB", "peak added MB", "peak of the process MB", "seconds"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for row in results:
        table.add_row(
            row["cache"], *(f"{row[key] / 1e6:.0f}" for key in ("held_bytes", "peak_added_bytes", "peak_bytes")),
            f"{row['seconds']:.0f}",
        )  # fmt: skip
    to_stdout().print(table)
    if args.json:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        Path(args.json).write_text(json.dumps([row | {"versions": versions} for row in results], indent=2))


if __name__ == "__main__":
    main()
