"""Passages of a text, each read as a prompt of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvfold.formats.numbers import LARGEST, whole


def text_passages(
    tokenizer: PreTrainedTokenizerBase, text: str, passage: int, count: int, offsets: Sequence[int] | None = None
) -> list[Tensor]:
    """Passages of a text, each beginning as the tokenizer begins a prompt; see `split_passages`.

    Many models have learned only on texts that begin with a token of their own (BOS). A passage from the middle of a
    text needs it, too: without it, Gemma 3 attends elsewhere, and predicts worse.
    """
    ids = tokenizer(text, return_tensors="pt").input_ids
    return split_passages(ids, passage, count, offsets, opening(tokenizer))


def opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a tokenizer puts in front of a whole prompt: a token that begins it, or nothing."""
    return [tokenizer.bos_token_id] if tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id] else []


def split_passages(
    ids: Tensor, passage: int, count: int, offsets: Sequence[int] | None = None, opening: Sequence[int] = ()
) -> list[Tensor]:
    """Passages of a text.

    Parameters
    ----------
    ids
        Tokens of the text, int64, (1, T).
    passage
        Tokens of each passage, at least 2 beside `opening`.
    count
        How many passages, spread evenly over the text; as many as fit without overlap.
    offsets
        Where each starts, in tokens of the text after `opening`, in the place of `count`.
    opening
        Tokens that every passage begins with, and that count to its length. The text may begin with them, too.

    Raises
    ------
    ValueError
        If the text is shorter than a passage, or an offset leaves no room for one.
    """
    first = torch.tensor([list(opening)], dtype=ids.dtype, device=ids.device)
    opened = first.shape[1]
    if torch.equal(ids[:, :opened], first):
        ids = ids[:, opened:]
    length = opened + ids.shape[1]
    for name, number in (("passage", passage), ("passages", count), *(("offset", offset) for offset in offsets or ())):
        whole(name, number, -LARGEST)
    if passage < 2 + opened:
        raise ValueError(
            f"passage = {passage}: a passage has at least {2 + opened} tokens, as one of the text predicts the next"
        )
    if length < passage:
        raise ValueError(f"the text has {length} tokens, fewer than a passage of {passage}: give a longer text")
    if offsets is None:
        if count < 1:
            raise ValueError(f"passages = {count}: give at least 1")
        count = min(count, length // passage)
        offsets = [i * (length - passage) // max(count - 1, 1) for i in range(count)]
    for offset in offsets:
        if not 0 <= offset <= length - passage:
            raise ValueError(
                f"offset = {offset}: a passage of {passage} tokens fits from 0 to {length - passage} in {length} tokens"
            )
    return [torch.cat((first, ids[:, offset : offset + passage - opened]), 1) for offset in offsets]
