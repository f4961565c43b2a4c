"""kvfold beside other packages that compress a KV cache: same model, same text, same protocol, bytes counted alike.

    python benchmarks/quality/rivals/rivals.py [--model gemma3-270m] [--context 2048] [--steps 64] [--offsets 0,40000]
        [--text FILE …] [--formats kvfold-4,kvfold-3,kvfold-2,kvfold-1] [--rivals tqai,turbo-attn] [--threads 1]
        [--json FILE]

The model is SmolLM2-135M or another, in float32. Each passage's context is prefilled in one pass; then its next tokens
come one at a time, whatever the model predicts. Figures are over those steps' predictions: KL(dense ||
folded) in nats, the share where both put the same token first, the difference of perplexity. The dense ones come from a
DynamicCache in the same protocol.

held: at the end every tensor, NumPy array and byte string that can be reached from the cache, tables and dense windows
included, each piece of memory once; bits are 8 * held / (numbers that a dense cache holds).

at best: the kindest account of the same cache. Windows that the package keeps in the model's dtype count at 16 bits, as
in a 16-bit model; a dense copy that lies beside the codes counts nothing. kvfold's figure is the same in both columns.

kvfold: of the formats that hold at most as many bytes as the rival, the one with the least KL, and whether that KL is
below the rival's; once against held, once against at best.

kvarn and oscar are those papers' codes, as formats of kvfold with its windows, and not packages of others.

Each package gets a process and an environment under the user's cache folder, which shares torch and transformers with
the Python that runs this (kvfold's own environment). ms/step is for information: one thread, and nothing is set up for
speed. All of it takes about twenty minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from caches import RIVALS, Package, package
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from kvfold.cli.output import to_stdout
from kvfold.evaluate import standard_text, text_passages
from kvfold.evaluate.quality import versions
from kvfold.integrations.text import text_sha256

sys.path.append(str(Path(__file__).parents[2]))  # models.py, packages.py
import models

from kvfold.integrations.unpacking import kept_models

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3-270m, or a model's folder")
    parser.add_argument("--context", type=int, default=2_048, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded after it")
    parser.add_argument("--offsets", default="0,40000", help="where passages of the standard text start, in tokens")
    parser.add_argument("--text", type=Path, action="append", help="a file whose start is a passage, in its place")
    parser.add_argument(
        "--formats", default="kvfold-4,kvfold-3,kvfold-2,kvfold-1", help="kvfold's formats, or kvfold-4/sliding, …"
    )
    parser.add_argument("--rivals", default=",".join(RIVALS), help="which of them")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    formats, rivals = args.formats.split(","), list(filter(None, args.rivals.split(",")))
    if unknown := [name for name in rivals if name not in RIVALS]:
        parser.error(f"no rival is called {', '.join(unknown)}: there are {', '.join(RIVALS)}")

    begin = perf_counter()
    passages, about = read_passages(args)
    names = ["dense", "kvfold", *rivals]
    packages = {name: package(name, formats) for name in names}
    rows: list[Row] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=Console(stderr=True)) as progress:
        torch.save(passages, Path(folder) / "passages.pt")
        calls = len(passages) * (args.steps + 1)
        task = progress.add_task("", total=calls * sum(len(each.settings) for each in packages.values()))
        done = 0
        for name, each in packages.items():
            progress.update(task, description=name)
            job = {
                "package": name, "model": args.model, "formats": formats, "folder": folder, "context": args.context,
                "threads": args.threads,
            }  # fmt: skip
            rows += run(name, each, job, lambda: progress.advance(task))
            done += calls * len(each.settings)
            progress.update(task, completed=done)  # a row that broke did not take all of its steps

    values = rows[0]["held_bytes"] // 4  # of the dense cache, float32
    judge(rows, values)
    print_table(rows, f"{args.model}, {len(passages)} × ({args.context:,} + {args.steps}) tokens")
    seconds = perf_counter() - begin
    Console(stderr=True).print(f"{seconds / 60:.1f} minutes")
    if args.json:
        about |= {"context": args.context, "steps": args.steps, "threads": args.threads, "versions": versions()}
        args.json.write_text(json.dumps(about | {"values": values, "seconds": seconds, "rows": rows}, indent=2))


def read_passages(args: argparse.Namespace) -> tuple[list[Tensor], dict[str, Any]]:
    """Token passages, (1, context + steps + 1) each, and what they are."""
    tokenizer = models.load(args.model)[1]
    texts = [file.read_text() for file in args.text] if args.text else [standard_text()]
    offsets = [0] if args.text else [int(offset) for offset in args.offsets.split(",")]
    length = args.context + args.steps + 1
    passages = [passage for text in texts for passage in text_passages(tokenizer, text, length, 1, offsets)]
    return passages, {"model": args.model, "text_sha": [text_sha256(text) for text in texts], "offsets": offsets}


def run(name: str, each: Package, job: dict[str, Any], step: Callable[[], None]) -> list[Row]:
    """All rows of a package, measured in its environment; rows with an error where it breaks."""
    rows: list[Row] = []
    tail: deque[str] = deque(maxlen=20)
    try:
        python = environment(name, each) if each.requirement else Path(sys.executable)
        file = Path(job["folder"]) / f"{name}.json"
        file.write_text(json.dumps(job))
        threads = {"OMP_NUM_THREADS": str(job["threads"]), "PYTHONWARNINGS": "ignore"}
        log = (Path(job["folder"]) / f"{name}.log").open("w+")
        command = [python, Path(__file__).with_name("worker.py"), file]
        with log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | threads
        ) as worker:  # fmt: skip
            for line in worker.stdout:
                event = json.loads(line)
                if "row" in event:
                    rows.append(event["row"])
                else:
                    step()
            worker.wait()
            log.seek(0)
            tail.extend(line for line in log.read().splitlines() if line.strip())
    except subprocess.CalledProcessError as error:
        tail.extend((error.stderr or str(error)).strip().splitlines())
    if name == "dense" and not rows:
        sys.exit("the dense run broke:\n" + "\n".join(tail))
    error = tail[-1] if tail else "no output"
    return rows + [
        {"package": name, "name": setting.name, "nominal": setting.nominal, "error": error}
        for setting in each.settings[len(rows) :]
    ]


def environment(name: str, each: Package) -> Path:
    """The Python of the package's environment, which is made if it is not there.

    It sees what the running Python's environment has (torch, transformers, kvfold), and its own package before that.
    """
    folder = (
        kept_models() / "rivals" / f"{each.requirement.replace('==', '-')}-py{sys.version_info[0]}{sys.version_info[1]}"
    )
    python = folder / "bin" / "python"
    # One environment for each host, since it leans on the host's packages.
    host = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    stamp = folder / "host.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == host:
        return python
    venv.create(folder, clear=True, with_pip=True)
    paths = {"base": str(folder), "platbase": str(folder)}
    # addsitedir, and not the bare path, so that the host's own .pth files count: kvfold may be installed editable.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in dict.fromkeys(host)]
    (Path(sysconfig.get_path("purelib", vars=paths)) / "host.pth").write_text("".join(lines))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", *each.pip_options, each.requirement]
    subprocess.run(install, check=True, capture_output=True, text=True)
    stamp.write_text(json.dumps(host))
    return python


def judge(rows: list[Row], values: int) -> None:
    """Add to each row its bits, and to each rival's how kvfold compares."""
    ours = [row for row in rows if row["package"] == "kvfold" and "error" not in row]
    for row in rows:
        if "error" in row:
            continue
        row["bits"] = 8 * row["held_bytes"] / values
        row["at_best_bits"] = 8 * row["at_best_bytes"] / values
        if row["package"] not in ("dense", "kvfold"):
            for key, limit in (("kvfold", row["held_bytes"]), ("kvfold_at_best", row["at_best_bytes"])):
                fitting = [our for our in ours if our["held_bytes"] <= limit]
                best = min(fitting, key=lambda our: our["kl_mean"], default=None)
                row[key] = best and {"format": best["name"], "ahead": best["kl_mean"] < row["kl_mean"]}


def print_table(rows: list[Row], title: str) -> None:
    """Rows by the bytes that they hold, those with errors last."""
    table = Table(title=title)
    for column in ("package", "cache", "K/V", "held MB", "bits", "at best", "KL", "top-1", "ΔPPL", "ms/step"):
        table.add_column(column, justify="left" if column in ("package", "cache") else "right")
    table.add_column("kvfold ahead: held")
    table.add_column("at best")
    for row in sorted(rows, key=lambda row: row.get("held_bytes", float("inf"))):
        start = [row["package"], row["name"], row["nominal"]]
        if "error" in row:
            table.add_row(*start, *[""] * 7, row["error"], style="dim")
            continue
        table.add_row(
            *start, f"{row['held_bytes'] / 1e6:.1f}", f"{row['bits']:.2f}", f"{row['at_best_bits']:.2f}",
            f"{row['kl_mean']:.4f}", f"{row['top1']:.3f}", f"{row['delta_ppl']:+.3f}",
            f"{1e3 * row['seconds_per_step']:.0f}", verdict(row, "kvfold"), verdict(row, "kvfold_at_best"),
            style="bold" if row["package"] == "kvfold" else None,
        )  # fmt: skip
    to_stdout().print(table)


def verdict(row: Row, key: str) -> str:
    """“yes (kvfold-4)”, “no (kvfold-2)”, or that no format is so small."""
    if key not in row:
        return ""
    return f"{'yes' if row[key]['ahead'] else 'no'} ({row[key]['format']})" if row[key] else "none so small"


if __name__ == "__main__":
    main()
