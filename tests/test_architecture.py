"""The layers of docs/architecture.md: imports point inwards only."""

import ast
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
}
# Modules that bring MLX with them: only those with MLX in their names, and what is made for it, may import them.
MLX = ("kvfold.kernels.mlx", "kvfold.cache.mlx", "kvfold.attention.mlx", "kvfold.integrations.mlx")
# Third-party packages that a layer may know of.
ENGINES = {
    "vllm": {"integrations"},
    "mlx": {"kernels", "integrations"},
    "mlx_lm": {"integrations"},
    "prometheus_client": {"integrations"},
    "transformers": {"integrations", "evaluate", "cli"},
    "typer": {"cli"},
    "rich": {"cli"},
}


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            names.add(node.module or "")
    return names


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert folders == set(ALLOWED) - {"planning"}


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_point_inwards(layer: str) -> None:
    for path in [*(ROOT / layer).rglob("*.py"), *ROOT.glob(f"{layer}.py")]:
        for name in _imports(path):
            top, *rest = name.split(".")
            if name.startswith(MLX):
                own = path.relative_to(ROOT).with_suffix("").parts
                assert "mlx" in own or layer == "cli", f"{path}: must not need MLX, which {name} brings"
            if top == "kvfold":
                assert rest, f"{path}: imports the package's front"
                assert rest[0] in ALLOWED[layer] | {layer}, f"{path}: {layer} must not import {name}"
            elif top in ENGINES:
                assert layer in ENGINES[top], f"{path}: {layer} must not know of {top}"
