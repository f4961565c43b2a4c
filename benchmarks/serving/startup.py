"""The tokens that the engine says its pool holds, at equal memory."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Row, reference
from rich.progress import Progress
from rich.table import Table
from server import Server, pool_options, served

from kvfold.integrations.models import demo_folder

LLAMA_128 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 49_152, "max_position_embeddings": 4_096, "rms_norm_eps": 1e-6, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    models: tuple[str, ...] = ("smollm2", "llama-128")
    max_model_len: int = 4_096
    max_num_seqs: int = 8
    pool_mib: int = 512


PLAN, QUICK = Plan(), Plan(models=("smollm2",))
CHOICES = ("pool_mib",)
"""What the command line may change."""


def why_not(plan: Plan) -> str | None:
    """Why a plan cannot be carried out."""
    return None if plan.pool_mib > 0 else f"pool_mib = {plan.pool_mib}: 1 or more"


def run(progress: Progress, kind: str, plan: Plan, more: list[str], **server: Any) -> list[Row]:
    rows = []
    folder = server.pop("logs")
    for name in plan.models:
        options = [*pool_options(plan), "--enforce-eager", *more]
        with tempfile.TemporaryDirectory() as scratch:
            model, head_dim = name, 64
            if name == "llama-128":
                model, head_dim = str(Path(scratch) / name), 128
                Path(model).mkdir()
                (Path(model) / "config.json").write_text(json.dumps(LLAMA_128))
                options += ["--load-format", "dummy", "--tokenizer", str(demo_folder())]
            log = folder / f"startup-{kind.replace(' ', '-')}-{name}.log"
            with served(progress, Server(kind, options, log, model=model, **server), f", {name}") as ready:
                rows.append({
                    "kind": kind, "model": name, "head_dim": head_dim, "pool_mib": plan.pool_mib,
                    "pool_tokens": ready.pool_tokens, "seconds": ready.seconds,
                })  # fmt: skip
    return rows


def tables(rows: list[Row]) -> Iterator[Table]:
    base = reference(rows)
    dense = {row["model"]: row for row in rows if row["kind"] == base}
    table = Table(title="startup: what the engine says its pool holds")
    for column in ("model", "head_dim", "cache", "pool MiB", "tokens", f"× {base}", "ready after s"):
        table.add_column(column, justify="left" if column in ("model", "cache") else "right")
    for row in sorted(rows, key=lambda row: row["head_dim"]):
        table.add_row(
            row["model"], str(row["head_dim"]), row["kind"], str(row["pool_mib"]), f"{row['pool_tokens']:,}",
            f"{row['pool_tokens'] / dense[row['model']]['pool_tokens']:.3f}", f"{row['seconds']:.0f}",
        )  # fmt: skip
    yield table
