"""`kvfold serve`: vLLM's server with a folded KV cache."""

from pathlib import Path
from typing import Annotated

import typer

from kvfold.cli.options import DENSE, parse_bytes
from kvfold.formats import DEFAULT, check_names
from kvfold.integrations.vllm.options import BUDGET, STREAMING, Options
from kvfold.integrations.vllm.serve import run, serve_arguments


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="smollm2 (packaged), a folder with weights, a GGUF file, or a name on a hub.")
    ],
    format: Annotated[
        str, typer.Option(help='What keys and values fold into (kvfold formats); "dense" for vLLM as it is.')
    ] = DEFAULT,
    calibration: Annotated[
        str | None,
        typer.Option(help="A file of `kvfold calibrate`; by default the engine reads a text at its first start."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="A folder for pages that outlive the server, and that several servers may share."),
    ] = None,
    keep_limit: Annotated[
        str, typer.Option(help="How much the folder may take, such as 500MB. What was used longest ago goes first.")
    ] = "20GB",
    eviction: Annotated[
        str | None,
        typer.Option(
            help="Let requests forget: by a TRIA file of `kvfold calibrate --eviction`, or "
            '"streaming", all but the first tokens and the newest.'
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help=f"With --eviction: how many tokens a request keeps, {BUDGET} by default.")
    ] = None,
    keep_prompt: Annotated[
        bool, typer.Option("--keep-prompt", help="With --eviction: the prompt stays, and the budget is for the rest.")
    ] = False,
) -> None:
    """Serve a model with vLLM on a CPU, its KV cache folded: OpenAI's API on 127.0.0.1:8000.

    Every other option goes to `vllm serve` as it is: --port, --api-key, --ssl-keyfile, --max-model-len,
    --kv-cache-memory-bytes, --max-num-seqs, --tensor-parallel-size, … (docs/serving.md).

    kvfold serve smollm2 --kv-cache-memory-bytes 1G

    curl 127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    """
    options = None
    if budget is not None and eviction is None:
        raise ValueError(f"budget = {budget}, but no --eviction: give a TRIA file, or {STREAMING!r}")
    if format != DENSE:
        check_names(format)
        folder = None if keep is None else str(keep.absolute())
        by = str(Path(eviction).absolute()) if eviction not in (None, STREAMING) else eviction
        limit = parse_bytes(keep_limit, "keep_limit")
        options = Options(format, calibration, folder, limit, by, budget or BUDGET, keep_prompt)
    for name, given in {"calibration": calibration, "keep": keep, "eviction": eviction}.items():
        if format == DENSE and given is not None:
            raise ValueError(f"{name}: format = 'dense' folds nothing; leave --{name} out, or name a format")
    run(serve_arguments(model, options, context.args), folds=options is not None)
