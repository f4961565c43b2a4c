"""`kvfold generate`: answer a prompt with a folded cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.cache_utils import CacheLayerMixin

from kvfold.cache.calibration import NAMES, OPTIONAL
from kvfold.cache.files.paths import check_output
from kvfold.cache.policy import Policy
from kvfold.cache.report import CacheReport
from kvfold.cli.options import (
    DENSE,
    CacheLimit,
    CalibrationFile,
    Dtype,
    Format,
    MemoryLimit,
    Model,
    RuntimeName,
    Sliding,
    Weights,
    WiredLimit,
    check_format,
    check_runtime,
    counted,
    parse_dtype,
    token_progress,
)
from kvfold.cli.output import Json, print_json
from kvfold.eviction import QueryStatistics, TriAttention
from kvfold.formats import DEFAULT, KeyStatistics
from kvfold.formats.numbers import LARGEST
from kvfold.integrations.models import load_model, sources_of
from kvfold.integrations.text import check_text, read_text
from kvfold.integrations.transformers import FoldedCache, attach
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.prompt import Answer, answer, common, prompt_ids, read_prompt
from kvfold.integrations.transformers.saving import check_savable

BUDGET = 2048
"""The paper's."""
COLDEST, HOTTEST = 1e-6, 1e6
"""Temperatures between which logits over a temperature are numbers that softmax can tell apart."""

CacheFile = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="A file to keep the folded cache in. If it is there, only what it does not hold yet of the prompt is "
        "read; prompt and answer are saved to it at the end.",
    ),
]
Replace = Annotated[bool, typer.Option("--replace", help="With --cache: let the file go that holds another document.")]
Tria = Annotated[
    Path | None,
    typer.Option(help="A TRIA file (`kvfold calibrate --eviction`): forget tokens that queries will not ask for."),
]
Budget = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LARGEST,
        help="With --eviction: tokens that each head of a layer keeps, 261 or more; 2048 by default.",
    ),
]


def generate(
    model: Model = "smollm2",
    format: Format = DEFAULT,
    prompt: Annotated[str | None, typer.Option(help="The prompt; after the file's text if both are given.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 text file to put before the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=LARGEST, help="When to stop, if the model does not.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily; above, samples.")] = 0.0,
    dtype: Dtype = None,
    weights: Weights = None,
    calibration: CalibrationFile = None,
    sliding: Sliding = False,
    cache_file: CacheFile = None,
    replace: Replace = False,
    eviction: Tria = None,
    budget: Budget = None,
    runtime: RuntimeName = "torch",
    cache_limit: CacheLimit = None,
    memory_limit: MemoryLimit = None,
    wired_limit: WiredLimit = None,
    raw: Annotated[bool, typer.Option(help="Do not put the prompt into the model's chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a prompt, a document, or a document and a question, with the cache folded.

    kvfold generate --prompt "Why is the sky blue?"

    kvfold generate --file report.txt --prompt "Summarise this." --format kvfold-4:turboquant-3

    Ask about one document again and again, and read it once:

    kvfold generate --file report.txt --prompt "Who wrote it?" --cache report.kv

    kvfold generate --file report.txt --prompt "And when?" --cache report.kv

    Go on and on in a fixed memory:

    kvfold calibrate --eviction --out smollm2.tria

    kvfold generate --prompt "Tell a long story." --max-new-tokens 4000 --eviction smollm2.tria --budget 1024

    On a Mac, by MLX:

    kvfold generate --runtime mlx --prompt "Why is the sky blue?" --cache-limit-mb 512
    """
    check_format(format)
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(f"temperature = {temperature}: give 0, or {COLDEST:g} to {HOTTEST:g}")
    if replace and cache_file is None:
        raise ValueError("--replace, but no --cache: there is no file to replace")
    evicts = _policy(eviction, budget, cache_file)
    limits = {"cache-limit-mb": cache_limit, "memory-limit-mb": memory_limit, "wired-limit-mb": wired_limit}
    check_runtime(runtime)
    for name, value, only in (
        ("cache", cache_file, "torch"), ("eviction", eviction, "torch"), ("sliding", sliding or None, "torch"),
        ("weights", weights, "torch"),
        *((*limit, "mlx") for limit in limits.items()),
    ):  # fmt: skip
        if value is not None and runtime != only:
            raise ValueError(f"{name} = {value}, and runtime = {runtime!r}: it is for runtime {only!r}; leave one out")
    held_in = parse_dtype(dtype)
    parts = [] if file is None else [read_text(file, "file")]
    if prompt is not None:
        parts.append(check_text(prompt, "prompt"))
    if cache_file is not None:
        check_output(cache_file, "cache", (file, calibration, *sources_of(model)))
    if not "".join(parts).strip():
        raise ValueError("nothing to answer: give --prompt, --file, or both")
    question = _Question(
        model, Policy(format, sliding=sliding), parts, max_new_tokens, temperature, held_in, weights, calibration, raw,
        as_json,
    )  # fmt: skip
    if runtime == "mlx":
        ids, held, said, report = _by_mlx(question, [*limits.values()])
    else:
        ids, held, said, report = _by_torch(question, evicts, cache_file, replace)
    if as_json:
        row = {
            "model": model, "runtime": runtime, "format": format, "prompt_tokens": ids.shape[1], "reused_tokens": held,
            "text": said.text, "new_tokens": said.tokens, "tokens_per_second": said.tokens_per_second,
        }  # fmt: skip
        return print_json(row | report.to_json())
    Console(stderr=True).print(
        f"[dim]{ids.shape[1]} prompt + {said.tokens} new tokens, {said.tokens_per_second:.1f} tok/s; cache holds "
        f"{report.held_bytes / 1e6:.2f} MB, {_bits(report)}, {_beside_bf16(report)}[/]",
        highlight=False,
        soft_wrap=True,
    )


def _policy(eviction: Path | None, budget: int | None, cache_file: Path | None) -> TriAttention | None:
    """Which tokens a cache forgets; raise where options do not go together."""
    if budget is not None and eviction is None:
        raise ValueError(f"budget = {budget}, but no --eviction: give the TRIA file by which tokens are chosen")
    if eviction is None:
        return None
    if cache_file is not None:
        raise ValueError(
            f"eviction = {str(eviction)!r} and cache = {str(cache_file)!r}: a cache that forgets tokens is not kept "
            "for other prompts; give one of them"
        )
    return TriAttention(budget=budget or BUDGET, statistics=QueryStatistics.load(eviction))


@dataclass(frozen=True)
class _Question:
    """A document and a prompt, or one of them, and how they are answered."""

    model: str
    policy: Policy
    parts: Sequence[str]
    max_new_tokens: int
    temperature: float
    dtype: torch.dtype | None
    weights: str | None
    calibration: Path | None
    raw: bool
    quiet: bool

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> Tensor:
        """Tokens of the whole prompt, (1, T)."""
        return prompt_ids(tokenizer, "\n\n".join(self.parts), self.raw)


_Answered = tuple[Tensor, int, Answer, CacheReport]
"""Tokens of the prompt, how many of them a file's cache held, the answer, and what the cache held at its end."""


def _by_torch(question: _Question, eviction: TriAttention | None, cache_file: Path | None, replace: bool) -> _Answered:
    network, tokenizer = load_model(question.model, question.dtype, question.weights)
    ids = question.ids(tokenizer)
    attach(network)
    cache = FoldedCache(network.config, policy=question.policy, calibration=question.calibration, eviction=eviction)
    if cache_file is not None:
        check_savable(cache.layers)
    if cache_file is not None and cache_file.exists():
        # The document's tokens are those that stay whatever is asked after it.
        starts = (prompt_ids(tokenizer, question.parts[0] + more, question.raw)[0] for more in ("", "\n\n?"))
        cache = _reused(cache_file, cache, ids, 0 if replace else common(*starts))
    held = cache.get_seq_length()
    with counted("reading the prompt", ids.shape[1] - 1, held) as read:
        read_prompt(network, ids, cache, progress=read)
    streamer = None if question.quiet else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    said = answer(network, tokenizer, ids, cache, question.max_new_tokens, question.temperature, streamer)
    if cache_file is not None:
        cache.save(cache_file, ids=said.ids[:, : cache.get_seq_length()])
    return ids, held, said, cache.report()


def _by_mlx(question: _Question, limits: list[int | None]) -> _Answered:
    from kvfold.integrations.mlx import cache_report, make_prompt_cache
    from kvfold.integrations.mlx.prompt import mlx_answer, set_memory_limits
    from kvfold.integrations.mlx.runtime import MlxRuntime

    set_memory_limits(*limits)
    runtime, tokenizer = MlxRuntime.load(question.model, question.dtype)
    ids = question.ids(tokenizer)
    cache = make_prompt_cache(runtime.model, policy=question.policy, calibration=question.calibration)
    with token_progress() as progress:
        task = progress.add_task("reading the prompt", total=ids.shape[1])

        def read(done: int, total: int) -> None:
            progress.update(task, completed=done, visible=done < total)

        said = mlx_answer(
            runtime.model, runtime.tokenizer, ids, cache, question.max_new_tokens, question.temperature,
            wired=limits[2] is not None, progress=read,
            say=(lambda text: None) if question.quiet else lambda text: print(text, end="", flush=True),
        )  # fmt: skip
    if not question.quiet:
        print()
    return ids, 0, said, cache_report(cache)


def _bits(report: CacheReport) -> str:
    """Bits a value where layers fold, and how much of that is still dense; if no layer folds, bits of them all."""
    share, some = report.dense_share, any(layer.format == "dense" for layer in report.layers)
    if isnan(share):
        return f"{report.bits_per_value:.2f} bits a value"
    if share == 1:
        return "nothing folded yet"
    return f"{report.folded_bits_per_value:.2f} bits a value{' where layers fold' if some else ''} ({share:.0%} dense)"


def _beside_bf16(report: CacheReport) -> str:
    """The size of the whole cache beside a dense one in bfloat16."""
    ratio = report.ratio_to_bf16
    if f"{ratio:.2f}" == "1.00":
        return "as large as in bf16"
    return f"{ratio:.2f}x smaller than in bf16" if ratio > 1 else f"{1 / ratio:.2f}x larger than in bf16"


def _reused(path: Path, fresh: FoldedCache, ids: Tensor, document: int) -> FoldedCache:
    """The cache in a file, cropped to what it holds of the prompt `ids` (1, T); `fresh` if there is no use for it.

    The last token of the prompt is left out: it is read to be answered. Raises ValueError if the file is of another
    kind. Also if it holds another document, which saving would overwrite: then it lacks some of the prompt's first
    `document` tokens.
    """
    loaded = FoldedCache.load(path, fresh.text_config)
    if loaded.ids is None or loaded.ids.shape[0] != 1:
        raise ValueError(f"cache = {str(path)!r} holds no tokens of one text: save it with cache.save(path, ids=ids)")
    if any(row.evicted for row in loaded.report().layers):
        raise ValueError(f"cache = {str(path)!r} forgot some of its tokens: give another --cache")
    for kept, asked in zip(loaded.layers, fresh.layers, strict=True):
        own, wanted = (
            layer.folded.config.format if isinstance(layer, FoldedLayer) else DENSE for layer in (kept, asked)
        )
        if own != wanted and not _same_formats(kept, asked):
            raise ValueError(
                f"cache = {str(path)!r} is folded as {own}, and format = {wanted!r}: give that one's --format, "
                "--calibration and --sliding, or another --cache"
            )
        if isinstance(kept, FoldedLayer) and not _alike(kept.folded.config.statistics, asked.folded.config.statistics):
            raise ValueError(
                f"cache = {str(path)!r} was made with another --calibration, or without one: give the same again, or "
                "another --cache"
            )
    held, prompt = loaded.ids[0], ids[0]
    alike = common(held, prompt)
    keep = min(alike, len(prompt) - 1)
    if keep == len(held):
        return loaded
    if alike < document:
        raise ValueError(
            f"cache = {str(path)!r} holds another document: of its {len(held)} tokens the prompt has the first "
            f"{alike}. Give another --cache, or --replace to let that one go"
        )
    say = f"{path} holds {len(held)} tokens; the prompt starts with the first {alike} of them"
    try:
        loaded.crop(keep - len(held))
    except RuntimeError:
        keep = 0
        say += ", and this model's sliding windows do not go back"
    Console(stderr=True).print(f"{say}: {keep} are reused", highlight=False, markup=False, soft_wrap=True)
    return loaded if keep else fresh


def _same_formats(kept: CacheLayerMixin, asked: CacheLayerMixin) -> bool:
    """Whether names of one layer's formats mean the same."""
    if not isinstance(kept, FoldedLayer) or not isinstance(asked, FoldedLayer) or kept.folded.shape is None:
        return False
    one, other = (layer.folded.config.formats_of(*kept.folded.shape[2:]) for layer in (kept, asked))
    return (one.keys, one.values) == (other.keys, other.values)


def _alike(one: KeyStatistics | None, other: KeyStatistics | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = [(getattr(one, name), getattr(other, name)) for name in (*NAMES, *OPTIONAL)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
