"""Serving SmolLM2 with vLLM on a CPU: kvfold's cache beside vLLM's own in bfloat16 and in fp8.

Each kind of cache has a server of its own, one after the other, with the same threads, lengths, memory and requests,
which are streamed, greedy and of fixed length. Run it with the Python of the environment that has vLLM and kvfold, and
on a machine that does nothing else: one other busy process can slow a server's threads, which wait for one another,
tenfold. There are seven parts:

startup  The tokens that the engine says its pool holds, at equal memory, for SmolLM2 (head_dim 64) and for a small
         random Llama of head_dim 128.
speed    Decoding by 1, 8 and 32 users at once, after prompts of several lengths. The users of a cell share one
         document, which prefix caching holds once, and differ in their last 16 tokens. A cell is timed from when the
         last user has its first token until the first user has its last one, so that all users decode all the time. A
         user's speed is its tokens between its first and last arrival in there over the time between the two; tok/s is
         the sum over users, "ms a token" the time of a step, users / tok/s, and "context ms" what a step takes above
         the one after the shortest prompt: attention. "Reading" is the time to the first token of a prompt that is
         not cached. Medians over rounds that each go through all cells, in brackets the least and the most. What users
         share may stay in the processor's own caches from one user to the next, which helps the larger cache; with
         --apart each has a document of its own.
load     Requests a minute when memory is short: 32 users in a closed loop, prompts of 500 to 1,500 tokens of which no
         two are alike, answers of 128 to 384, and a pool in which a bfloat16 cache must queue and preempt. Requests a
         minute are those of the whole list; latency runs from sending a request to its last token; "running" and
         "waiting" are the most that the engine reported, twice a second.
soak     1,000 short requests by 16 users, some of them abandoned in mid-stream, some asking for two answers: resident
         memory of all of the server's processes after every 100, when nothing runs.
kept     A server reads a prompt of 4,000 tokens, ends, and starts again: the time to the first token, before and after;
         kvfold's kinds keep their pages in a folder.
forget   Requests a minute as in "load", by 16 users with prompts of 3,000 to 7,000 tokens; kvfold's kinds once more
         with a budget of 2,048 tokens a request (--eviction streaming).
drafts   Decoding without and with drafts by n-grams, by 1 and 8 users: after a passage and its first quarter again,
         which a model likes to copy, and after a passage alone.

    python benchmarks/serving                               # all parts and kinds: about an hour
    python benchmarks/serving --quick                       # the same in small: a quarter of one
    python benchmarks/serving --parts speed --kinds bf16,kvfold-4 --contexts 64,7900 --users 1
    python benchmarks/serving --parts load --repeat-first   # how much did the machine change meanwhile?

Kinds are bf16 and fp8, vLLM's own, and formats of kvfold. A part's results replace that part's in the JSON file and
leave the others. What servers write is in a folder beside it.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvfold.cli.output import to_stdout

PARTS = ("startup", "speed", "load", "soak", "kept", "forget", "drafts")
KINDS = ("bf16", "fp8", "kvfold-4")
"""bf16 and fp8 are vLLM's own caches; other names are formats of kvfold."""
RESULTS = Path(__file__).resolve().parents[2] / "build" / "serving.json"

Row = dict[str, Any]

console = to_stdout()


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in listed(text))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", default=PARTS, type=listed, help=f"by default {','.join(PARTS)}")
    add(
        "--kinds",
        default=KINDS,
        type=listed,
        help=f"in the order in which they are served, by default {','.join(KINDS)}",
    )
    add("--quick", action="store_true", help="small sizes, to see that everything works")
    add("--repeat-first", action="store_true", help="serve the first kind once more at the end, beside itself")
    add("--contexts", type=numbers, help="speed: lengths of prompts in tokens")
    add("--users", type=numbers, help="speed: numbers of users, 32 at most")
    add("--rounds", type=int, help="speed and drafts: how often each cell is measured")
    add(
        "--apart",
        action="store_true",
        default=None,
        help="speed: users have documents of their own, which the pool must hold together",
    )
    add("--new", type=int, help="speed: tokens that each user decodes")
    add("--requests", type=int, help="load and soak: how many")
    add("--pool-mib", type=int, help="memory of the cache; it must hold one request of the longest")
    add(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of a server's model, by default the cores; 0 for vLLM's own binding",
    )
    add("--serve-options", default="", help="for all kinds, as in --serve-options='--enforce-eager --block-size 64'")
    add("--start-timeout", type=float, default=600, help="seconds after which a server counts as failed")
    add("--json", type=Path, default=RESULTS, help="where results go, part by part; by default build/serving.json")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    if not args.kinds or not args.parts:
        parser.error("name at least one kind and one part")
    if any(find_spec(name) is None for name in ("aiohttp", "psutil", "kvfold")):
        parser.error("run this with the Python of the environment that has both vLLM and kvfold")
    return args


def planned(args: argparse.Namespace, part: ModuleType) -> Any:
    """A part's sizes, as the command line says."""
    plan = part.QUICK if args.quick else part.PLAN
    given = {name: getattr(args, name) for name in part.CHOICES if getattr(args, name) is not None}
    if "new" in given:
        given["new_of_many"] = given["new"]
    plan = replace(plan, **given)
    if (why := part.why_not(plan)) is not None:
        sys.exit(f"serving, {part.__name__}: {why}")
    return plan


def run(progress: Progress, part: ModuleType, kind: str, plan: Any, more: list[str], **settings: Any) -> list[Row]:
    """One kind's rows of a part, from a server of its own."""
    from server import Server, pool_options, served

    if part.__name__ in ("startup", "kept", "forget", "drafts"):
        return part.run(progress, kind, plan, more, **settings)
    log = settings.pop("logs") / f"{part.__name__}-{kind.replace(' ', '-')}.log"
    with served(progress, Server(kind, [*pool_options(plan), *more], log, **settings)) as ready:
        task = progress.add_task(f"{part.__name__}, {kind}", total=plan.steps)
        try:
            rows = asyncio.run(part.measure(ready, plan, lambda: progress.advance(task)))
        finally:
            progress.remove_task(task)
    for row in rows:
        row |= {"ready_s": ready.seconds, "others": ready.others}
    return rows


def main() -> None:
    args = arguments()
    import aiohttp
    from figures import about, save
    from server import ServingError, stderr

    parts = {name: import_module(name) for name in args.parts}
    plans = {name: planned(args, part) for name, part in parts.items()}
    kinds = [*args.kinds, *([f"{args.kinds[0]} again"] if args.repeat_first else [])]
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that servers are stopped then too
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    server = {"logs": args.json.with_suffix(""), "threads": args.threads, "timeout": args.start_timeout}
    machine = about()
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {args.threads} threads, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB; "
        + ", ".join(f"{package} {value}" for package, value in machine["versions"].items()),
        highlight=False,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    more = shlex.split(args.serve_options)
    try:
        for name, plan in plans.items():
            rows: list[Row] = []
            start = time.perf_counter()
            try:
                with Progress(*columns, console=stderr, transient=True) as progress:
                    for kind in kinds:
                        rows += run(progress, parts[name], kind, plan, more, **server)
                        settings = asdict(plan) | {"serve_options": more, "threads": args.threads}
                        settings |= {"quick": args.quick, "seconds": time.perf_counter() - start}
                        save(args.json, name, {"settings": settings, "rows": rows, **machine})
            finally:  # what there is, should a later kind fail
                for table in parts[name].tables(rows) if rows else ():
                    console.print(table)
            console.print(f"{name} took {(time.perf_counter() - start) / 60:.1f} min; in {args.json}", highlight=False)
    except (ServingError, aiohttp.ClientError) as error:
        sys.exit(f"serving: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
