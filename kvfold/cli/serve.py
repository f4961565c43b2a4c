"""`kvfold serve`: vLLM's server, or mlx-lm's, with a folded KV cache."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvfold.cache.calibration import Calibration
from kvfold.cache.policy import Policy
from kvfold.cli.options import DENSE, CacheLimit, Dtype, MemoryLimit, WiredLimit, parse_bytes, parse_dtype
from kvfold.formats import DEFAULT, check_names
from kvfold.integrations.vllm.options import BUDGET, KEEP_LIMIT, STREAMING, Options
from kvfold.integrations.vllm.serve import run, serve_arguments

RUNTIMES = ("vllm", "mlx")


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
    runtime: Annotated[
        str, typer.Option(help=escape("vllm, or mlx (Macs; pip install 'kvfold[mlx]'): whose server."))
    ] = "vllm",
    dtype: Dtype = None,
    keep: Annotated[
        Path | None,
        typer.Option(help="vllm: a folder for pages that outlive the server, and that several servers may share."),
    ] = None,
    keep_limit: Annotated[
        str | None,
        typer.Option(
            help="With --keep: how much the folder may take, such as 500MB; 20GB by default. What was used longest ago "
            "goes first."
        ),
    ] = None,
    eviction: Annotated[
        str | None,
        typer.Option(
            help="vllm: let requests forget: by a TRIA file of `kvfold calibrate --eviction`, or "
            '"streaming", all but the first tokens and the newest.'
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help=f"With --eviction: how many tokens a request keeps, {BUDGET} by default.")
    ] = None,
    keep_prompt: Annotated[
        bool, typer.Option("--keep-prompt", help="With --eviction: the prompt stays, and the budget is for the rest.")
    ] = False,
    cache_limit: CacheLimit = None,
    memory_limit: MemoryLimit = None,
    wired_limit: WiredLimit = None,
) -> None:
    """Serve a model with its KV cache folded, by OpenAI's API: with vLLM on a CPU, or with mlx-lm on a Mac.

    Every other option goes to the server as it is. vLLM's, on 127.0.0.1:8000 (docs/serving.md): --port, --api-key,
    --ssl-keyfile, --max-model-len, --kv-cache-memory-bytes, --max-num-seqs, --tensor-parallel-size, … mlx-lm's, on
    127.0.0.1:8080 (docs/mlx.md): --port, --prompt-cache-bytes, --decode-concurrency, --temp, …

    kvfold serve smollm2 --kv-cache-memory-bytes 1G

    curl 127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    """
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime = {runtime!r}: choose one of {', '.join(RUNTIMES)}")
    limits = {"cache_limit_mb": cache_limit, "memory_limit_mb": memory_limit, "wired_limit_mb": wired_limit}
    of_vllm = {
        "keep": keep, "keep_limit": keep_limit, "eviction": eviction, "budget": budget,
        "keep_prompt": keep_prompt or None,
    }  # fmt: skip
    for only, own in (("vllm", of_vllm), ("mlx", limits)):
        for name, given in own.items():
            if runtime != only and given is not None:
                raise ValueError(
                    f"{name} = {given}, and runtime = {runtime!r}: it is for runtime {only!r}; leave one out"
                )
    if runtime == "mlx":
        return _by_mlx(model, format, calibration, dtype, list(limits.values()), context.args)
    options, rest = None, context.args if dtype is None else [*context.args, "--dtype", dtype]
    for name, of_eviction in {"budget": budget, "keep_prompt": keep_prompt or None}.items():
        if of_eviction is not None and eviction is None:
            raise ValueError(f"{name} = {of_eviction}, but no --eviction: give a TRIA file, or {STREAMING!r}")
    if keep_limit is not None and keep is None:
        raise ValueError(f"keep_limit = {keep_limit!r}, but no --keep: name the folder")
    if format != DENSE:
        check_names(format)
        folder = None if keep is None else str(keep.absolute())
        by = str(Path(eviction).absolute()) if eviction not in (None, STREAMING) else eviction
        limit = KEEP_LIMIT if keep_limit is None else parse_bytes(keep_limit, "keep_limit")
        options = Options(format, calibration, folder, limit, by, BUDGET if budget is None else budget, keep_prompt)
    for name, given in {"calibration": calibration, "keep": keep, "eviction": eviction}.items():
        if format == DENSE and given is not None:
            raise ValueError(f"{name}: format = 'dense' folds nothing; leave --{name} out, or name a format")
    run(serve_arguments(model, options, rest), folds=options is not None)


def _by_mlx(
    model: str, format: str, calibration: str | None, dtype: str | None, limits: list[int | None], rest: list[str]
) -> None:
    """`kvfold serve --runtime mlx`."""
    from kvfold.integrations.mlx.prompt import set_memory_limits
    from kvfold.integrations.mlx.serve import serve as serve_by_mlx

    policy = Policy(format)
    set_memory_limits(*limits)
    measured = None if calibration is None else Calibration.load(calibration)
    serve_by_mlx(model, policy, measured, parse_dtype(dtype), rest)
