"""The layers of docs/architecture.md: imports point inwards only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfold

ROOT = Path(kvfold.__file__).parent

# A layer may import itself and what is listed.
ALLOWED = {
    "quant": set(),
    "kernels": {"quant"},
    "formats": {"quant", "kernels"},
    "cache": {"quant", "kernels", "formats"},
    "attention": {"quant", "kernels", "formats", "cache"},
    "eviction": {"quant", "kernels", "formats", "cache", "attention"},
    "integrations": {"kernels", "formats", "cache", "attention", "eviction"},
    "evaluate": {"quant", "kernels", "formats", "cache", "attention", "eviction", "integrations"},
    "planning": {"quant", "formats", "cache"},
    "cli": {"formats", "cache", "attention", "eviction", "integrations", "evaluate", "planning"},
    "api": {"attention", "cache", "formats", "eviction", "integrations", "planning"},
    "__init__": {"api"},
}
# Modules that bring MLX with them. Only those with MLX in their names, and what is made for it, may import them; the
# command line may where a command runs.
MLX = ("kvfold.kernels.mlx", "kvfold.cache.mlx", "kvfold.attention.mlx", "kvfold.integrations.mlx")
# Third-party packages, and the folders and files that may know of them.
ENGINES = {
    "vllm": ("integrations/vllm/",),
    "prometheus_client": ("integrations/vllm/",),
    "mlx": ("kernels/mlx/", "integrations/mlx/"),
    "mlx_lm": ("integrations/mlx/",),
    "transformers": (
        "integrations/transformers/", "integrations/models.py", "integrations/gguf_configs.py",
        "integrations/unpacking.py", "integrations/weights.py", "integrations/harness.py",
        "integrations/mlx/runtime.py", "evaluate/", "cli/",
    ),
    "lm_eval": ("integrations/harness.py", "cli/harness.py"),
    "torchao": ("integrations/weights.py",),
    "typer": ("cli/",),
    "rich": ("cli/",),
}  # fmt: skip


def _imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, and every name that is imported from one: it may be a module, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within_functions(tree: ast.Module) -> set[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name for function in functions for name in _imports(function)}


def _layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(path for path in ROOT.rglob("*.py"))


def test_every_file_is_in_a_layer() -> None:
    assert {_layer_of(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_inwards(path: Path) -> None:
    tree, layer, own = ast.parse(path.read_text()), _layer_of(path), path.relative_to(ROOT).as_posix()
    where_it_runs = _within_functions(tree)
    for name in _imports(tree):
        top, *rest = name.split(".")
        if any(name == module or name.startswith(f"{module}.") for module in MLX):
            allowed = "mlx" in Path(own).with_suffix("").parts or (layer == "cli" and name in where_it_runs)
            assert allowed, f"{own}: must not need MLX, which {name} brings"
        if top == "kvfold":
            assert rest, f"{own}: imports the package's front"
            assert rest[0] in ALLOWED[layer] | {layer}, f"{own}: {layer} must not import {name}"
        elif top in ENGINES:
            assert own.startswith(ENGINES[top]), f"{own}: must not know of {top}"
