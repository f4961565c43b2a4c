"""Reading prompts and answering them, the same way for every cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from kvfold.integrations.transformers.calls import cache_argument


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str  # the new tokens, decoded
    tokens: int  # how many new ones
    seconds: float  # time from the last prompt token to the last new one
    ids: Tensor  # token ids of the prompt and the answer, (1, T)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed."""
        return self.tokens / self.seconds


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool = False) -> Tensor:
    """Token ids (1, T) of a prompt, in the tokenizer's chat template if it has one and `raw` is off."""
    if raw or tokenizer.chat_template is None:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        message = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
    if ids.shape[1] < 2:
        raise ValueError("the prompt is empty: give at least two tokens")
    return ids


def common(one: Tensor, other: Tensor) -> int:
    """How many tokens two texts, (T,), have in common before they part."""
    both = min(len(one), len(other))
    return int((one[:both] == other[:both]).long().cumprod(0).sum())


PLAIN = {
    "use_cache": True, "cache_implementation": None, "num_beams": 1, "num_return_sequences": 1,
    "return_dict_in_generate": False, "output_attentions": False, "output_hidden_states": False,
    "prompt_lookup_num_tokens": None, "assistant_early_exit": None, "use_mtp": False, "penalty_alpha": None,
    "constraints": None, "force_words_ids": None, "dola_layers": None, "max_time": None,
}  # fmt: skip
"""Settings of `generate` that a greedy or sampled answer, token by token into a given cache, needs."""


def plain_settings(model: PreTrainedModel) -> dict[str, Any]:
    """`PLAIN`, as far as this release of transformers has it, for calls of `generate`: a model's own may differ."""
    return {name: value for name, value in PLAIN.items() if hasattr(model.generation_config, name)}


@torch.no_grad()
def read_prompt(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Cache,
    chunk: int = 512,
    progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Fill `cache` in chunks with all of `ids` (1, T) but the last token; it may hold the first ones already.

    `progress` is called with the number of tokens read after each chunk.
    """
    for start in range(cache.get_seq_length(), ids.shape[1] - 1, chunk):
        part = ids[:, start : min(start + chunk, ids.shape[1] - 1)]
        model(part, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
        progress(part.shape[1])


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    cache: Cache,
    max_new_tokens: int,
    temperature: float = 0.0,
    streamer: BaseStreamer | None = None,
) -> Answer:
    """Continue `ids` (1, T), of which `cache` holds all but the last token; greedy at temperature 0."""
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    start = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(model, cache),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=streamer,
        logits_processor=LogitsProcessorList([_refuse_no_numbers]),
        tokenizer=tokenizer,  # for the model's own stop strings
        **plain_settings(model),
        **sampling,
    )
    seconds = time.perf_counter() - start
    new = out[0, ids.shape[1] :]
    return Answer(tokenizer.decode(new, skip_special_tokens=True), len(new), seconds, out)


def _refuse_no_numbers(ids: Tensor, scores: Tensor) -> Tensor:
    """Scores as they are; raises ValueError on a NaN or +∞, by which no token can be chosen (−∞ only bars a token)."""
    if scores.isnan().any() or (scores == torch.inf).any():
        raise ValueError(
            "the model's predictions hold a NaN or an infinity: its weights are damaged, or its dtype has too small a "
            "range"
        )
    return scores
