"""Holding conversations with a model, several at once, on one cache."""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.calibration import Calibration
from kvfold.evaluate.behaviour.case import Case, Replies
from kvfold.integrations.transformers import FoldedCache
from kvfold.integrations.transformers.calls import cache_argument
from kvfold.integrations.transformers.layer import FoldedLayer
from kvfold.integrations.transformers.prompt import plain_settings

BATCH_TOKENS = 8_192
"""About how many tokens a batch may hold."""
PREFILL_CHUNK = 512


@torch.no_grad()
def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    format: str | None,
    done: Callable[[Case, Replies, float], None],
    *,
    calibration: Calibration | None = None,
) -> None:
    """Hold the conversation of every case with an attached model, greedily, and call `done` when it ends.

    `done` is called with the case, its replies, and the share of its tokens that is folded then. Turns go on from the
    cache of the turn before, as in a chat. `format` None is a dense cache; without `calibration`, folded ones take the
    statistics of each prompt's first tokens.
    """
    for batch in batches(cases):
        cache = (
            DynamicCache(config=model.config)
            if format is None
            else FoldedCache(model.config, format, calibration=calibration)
        )
        held = _hold(model, tokenizer, batch, cache)
        for case, replies, folded in zip(batch, held, _folded(cache, len(batch)), strict=True):
            done(case, replies, folded)


def _folded(cache: DynamicCache | FoldedCache, rows: int) -> list[float]:
    """Each row's folded share of its tokens, as a mean over the layers that fold; 0 if none does."""
    layers = [layer.folded.folded_shares() for layer in cache.layers if isinstance(layer, FoldedLayer)]
    return [fmean(row) for row in zip(*layers, strict=True)] or [0.0] * rows


def batches(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that can share a batch: all replies but the last have a length known beforehand."""

    def shape(case: Case) -> tuple[object, ...]:
        later = tuple((turn.forced, turn.max_new_tokens, len(turn.ids)) for turn in case.turns[1:])
        return (case.turns[0].forced, case.turns[0].max_new_tokens, *later)

    out: list[list[Case]] = []
    for _, same in groupby(sorted(cases, key=lambda case: repr(shape(case))), key=shape):
        batch: list[Case] = []
        for case in sorted(same, key=lambda case: case.tokens):
            alone = not all(turn.forced for turn in case.turns[:-1])
            if batch and (alone or (len(batch) + 1) * case.tokens > BATCH_TOKENS):
                out.append(batch)
                batch = []
            batch.append(case)
        out.append(batch)
    return out


def _hold(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[Case], cache: DynamicCache | FoldedCache
) -> Sequence[Replies]:
    end = model.generation_config.eos_token_id
    ends = {*(end if isinstance(end, list) else [end]), tokenizer.eos_token_id} - {None}
    filler = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids, mask = _left_padded([case.turns[0].ids for case in batch], filler or 0, model.device)
    replies: list[list[list[int]]] = [[] for _ in batch]
    for i, turn in enumerate(batch[0].turns):
        if i:
            more = torch.tensor([case.turns[i].ids for case in batch], device=model.device)
            ids, mask = torch.cat((ids, more), 1), torch.cat((mask, torch.ones_like(more)), 1)
        out = model.generate(
            ids,
            attention_mask=mask,
            **cache_argument(model, cache),
            max_new_tokens=turn.max_new_tokens,
            min_new_tokens=turn.max_new_tokens if turn.forced else None,
            prefill_chunk_size=PREFILL_CHUNK,
            do_sample=False,
            eos_token_id=sorted(ends) or None,
            pad_token_id=filler,
            tokenizer=tokenizer,  # for the model's own stop strings
            **plain_settings(model),
        )
        new = out[:, ids.shape[1] :]
        for row, reply in zip(new.tolist(), replies, strict=True):
            stop = len(row) if turn.forced else next((j for j, token in enumerate(row) if token in ends), len(row))
            reply.append(row[:stop])
        if len(batch) == 1:  # the next turn brings the end-of-text token
            new = new[:, : len(replies[0][-1])]
        ids, mask = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
    return replies


def _left_padded(rows: Sequence[Sequence[int]], filler: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), filler, dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row, device=device)
        mask[i, width - len(row) :] = 1
    return ids, mask
