"""`kvfold demo`: one model, one document, one question, dense and folded."""

from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvfold.cache.report import DERIVED, CacheReport, walk_tensors
from kvfold.cli.options import Model, counted, formats_beside_dense, parse_dtype
from kvfold.cli.output import Json, print_json, to_stdout
from kvfold.evaluate import FidelityMeter, read_in_lockstep, standard_text
from kvfold.evaluate.records import ABOUT_HELD, HELD, held_cells
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.prompt import answer, prompt_ids
from kvfold.integrations.transformers.reporting import report_of

SECRET = "The secret code of the lighthouse is 48213."
"""It stands in the middle of the document. No model knows it from elsewhere."""
QUESTION = "What is the secret code of the lighthouse? Answer in one sentence."


def demo(
    model: Model = "smollm2",
    formats: Annotated[str, typer.Option(help="Formats to compare, separated by commas.")] = (
        "kvfold-4,kvfold-3,kvfold-2,turboquant-4,turboquant-3"
    ),
    tokens: Annotated[int, typer.Option(min=256, max=LARGEST, help="Tokens of the document.")] = 4_096,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="Longest answer.")] = 48,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Read a document with a dense and with folded caches, then answer a question about it.

    The document is the beginning of the language reference in Python's standard library, with a secret in its middle
    that the question asks for. While it is read, every prediction is compared with the dense cache's: PPL is
    perplexity, KL the mean divergence a token. Held MB counts every tensor that the cache owns.
    """
    names = formats_beside_dense(formats)
    console = Console(stderr=True)
    with console.status("loading the model"):
        network, tokenizer = load_model(model, parse_dtype(dtype))
    attach(network)
    words = tokenizer(standard_text()).input_ids[:tokens]
    before, after = tokenizer.decode(words[: len(words) // 2]), tokenizer.decode(words[len(words) // 2 :])
    document = f"Here is a part of the Python language reference.\n\n{before}\n\n{SECRET}\n\n{after}"
    ids = prompt_ids(tokenizer, f"{document}\n\n{QUESTION}")

    folded = {name: FoldedCache(network.config, name) for name in names}
    caches = {"dense": DynamicCache(config=network.config), **folded}
    meters = {name: FidelityMeter() for name in caches}
    with counted(f"reading with {len(caches)} caches", len(caches) * (ids.shape[1] - 1)) as read:
        read_in_lockstep(network, ids[:, :-1], caches["dense"], folded, meters, progress=read)
    rows: list[dict[str, Any]] = []
    for name, cache in caches.items():
        with console.status(f"answering with {name}"):
            report = folded[name].report() if name in folded else _dense_report(cache)
            said = answer(network, tokenizer, ids, cache, max_new_tokens)
        result = meters[name].result()
        rows.append(
            {
                "format": name,
                "prompt_tokens": ids.shape[1],
                "answer": " ".join(said.text.split()),
                "held_bytes": report.held_bytes,
                **{figure: getattr(report, figure) for figure in DERIVED},
                "ppl": result.ppl,
                "kl_mean": result.kl_mean,
                "top1": result.top1,
                "tokens_per_second": said.tokens_per_second,
            }
        )
    if as_json:
        return print_json(rows)
    _print(rows, model)


def _dense_report(cache: Cache) -> CacheReport:
    """What a dense cache holds, without what its windows, views of a whole chunk until the next token, keep alive."""
    tensors = walk_tensors(cache.layers)
    return replace(report_of(cache.layers, ()), held_bytes=sum(tensor.nbytes for tensor in tensors))


def _print(rows: list[dict[str, Any]], model: str) -> None:
    console = to_stdout()
    figures = Table(
        title=f"{model}, {rows[0]['prompt_tokens']:,} tokens of context",
        caption=f"{ABOUT_HELD}; KL: mean divergence from dense, a token",
    )
    for column in ("cache", "held MB", *HELD, "PPL", "KL", "tok/s"):
        figures.add_column(column, justify="left" if column == "cache" else "right", no_wrap=True)
    answers = Table(title=f"“{QUESTION}”", show_lines=True)
    answers.add_column("cache", no_wrap=True)
    answers.add_column("answer")
    for row in rows:
        figures.add_row(
            row["format"], f"{row['held_bytes'] / 1e6:.1f}", *held_cells(row), f"{row['ppl']:.3f}",
            "-" if row["format"] == "dense" else f"{row['kl_mean']:.4f}", f"{row['tokens_per_second']:.1f}",
        )  # fmt: skip
        answers.add_row(row["format"], escape(row["answer"]))
    console.print(answers)
    console.print(figures)
