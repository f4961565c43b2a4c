"""Evaluation: what is counted, and how passages are cut."""

import json
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from small_model import LAYERS
from tokenizers.processors import TemplateProcessing
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.evaluate import FidelityMeter, evaluate_formats, split_passages, text_passages
from kvfold.evaluate.quality import codec_errors
from kvfold.integrations.text import text_sha256
from kvfold.integrations.transformers.runtime import TransformersRuntime


def test_meter_against_the_definitions() -> None:
    logits, dense = torch.randn(2, 50, 30, dtype=torch.float64)
    targets = torch.randint(0, 30, (50,))
    meter = FidelityMeter()
    meter.add(logits[:20], dense[:20], targets[:20])
    meter.add(logits[20:], dense[20:], targets[20:])
    result = meter.result()
    p, q = dense.softmax(-1), logits.softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert result.tokens == 50
    assert result.ppl == pytest.approx(math.exp(-q[torch.arange(50), targets].log().mean()), rel=1e-5)
    assert result.kl_mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert result.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-5)
    assert result.top1 == (p.argmax(-1) == q.argmax(-1)).double().mean().item()


def test_passages() -> None:
    ids = torch.arange(1000).unsqueeze(0)
    assert [p[0, 0].item() for p in split_passages(ids, 100, 4)] == [0, 300, 600, 900]
    assert [p[0, 0].item() for p in split_passages(ids, 400, 4)] == [0, 600]  # no more than fit
    assert [p[0, 0].item() for p in split_passages(ids, 1000, 4)] == [0]
    assert [p.tolist() for p in split_passages(ids, 2, 1, offsets=[7, 998])] == [[[7, 8]], [[998, 999]]]
    for arguments, message in (
        ((ids, 1001, 1), "the text has 1000 tokens, fewer than a passage of 1001"),
        ((ids, 1, 1), "passage = 1"),
        ((ids, 10, 0), "passages = 0"),
        ((ids, 100, 1, [901]), "offset = 901: a passage of 100 tokens fits from 0 to 900 in 1000 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            split_passages(*arguments)


def test_passages_that_begin_as_prompts_do() -> None:
    """A token that begins prompts begins every passage, whether the text has it or not, and counts to its length."""
    text = torch.arange(1000).unsqueeze(0)
    begun = torch.cat((torch.tensor([[7777]]), text), 1)
    for ids, length in ((text, 100), (begun, 100)):
        passages = split_passages(ids, length, 2, opening=[7777])
        assert [p[0, :2].tolist() for p in passages] == [[7777, 0], [7777, 901]]
        assert [p.shape for p in passages] == [(1, length)] * 2
        assert passages[-1][0, -1] == 999  # none is lost
    assert split_passages(begun, 1001, 1, opening=[7777])[0].tolist() == begun.tolist()
    assert split_passages(begun, 3, 1, offsets=[998], opening=[7777])[0].tolist() == [[7777, 998, 999]]
    with pytest.raises(ValueError, match="offset = 999: a passage of 3 tokens fits from 0 to 998 in 1001 tokens"):
        split_passages(begun, 3, 1, offsets=[999], opening=[7777])
    with pytest.raises(ValueError, match="passage = 2: a passage has at least 3 tokens"):
        split_passages(begun, 2, 1, opening=[7777])


def test_passages_of_a_tokenizer(small: tuple[PreTrainedModel, PreTrainedTokenizerBase], fixed_text: str) -> None:
    """SmolLM2 begins prompts with nothing. The same tokenizer with a token that begins them puts it everywhere."""
    tokenizer = deepcopy(small[1])
    plain = text_passages(tokenizer, fixed_text, 100, 3)
    tokenizer.bos_token = "<|im_start|>"
    assert [p.tolist() for p in text_passages(tokenizer, fixed_text, 100, 3)] == [p.tolist() for p in plain]
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    begun = text_passages(tokenizer, fixed_text, 100, 3)
    assert [p[0, 0].item() for p in begun] == [bos] * 3
    assert all(bos not in p[0, 1:] for p in begun)
    assert begun[0][0, 1:].tolist() == plain[0][0, :99].tolist()


def test_rows(small: tuple[PreTrainedModel, PreTrainedTokenizerBase], fixed_text: str) -> None:
    """Figures agree with each other, and layer errors are those of the codec."""
    model, tokenizer = deepcopy(small[0]), small[1]
    for layer in model.model.layers[1::2]:  # attention is flat there, and keys get fewer bits
        layer.self_attn.q_proj.weight.mul_(0.05)
    passages = split_passages(tokenizer(fixed_text, return_tensors="pt").input_ids, 300, 1, offsets=[500])
    seen = []
    rows = evaluate_formats(
        model, passages, ["turboquant-4", "centred-4:turboquant-2", "kvfold-4:turboquant-2"], progress=seen.append
    )
    assert sum(seen) == 4 * 300
    paper, mixed, uneven = rows
    assert paper.n_tokens == 299
    assert paper.delta_ppl == pytest.approx(paper.ppl - paper.ppl_dense)
    assert paper.delta_ppl_pct == pytest.approx(100 * paper.delta_ppl / paper.ppl_dense)
    assert len(paper.key_error) == LAYERS
    errors = (*paper.key_error, *paper.value_error)
    assert sum(errors) / len(errors) == pytest.approx(0.00913, rel=0.02)  # that of Gaussian coordinates
    for error in errors:
        assert error == pytest.approx(0.00913, rel=0.2)
    assert max(mixed.key_error) < 0.0095  # around a centre
    assert min(mixed.value_error) > 0.09  # two bits
    assert sum(uneven.key_error) / LAYERS < 0.0095 < max(uneven.key_error) < 4 * 0.0095  # layers of 3 to 5 bits
    row = paper.to_json(model="smollm2", text_sha=text_sha256("x"))
    expected = (
        "model text_sha n_tokens format ppl_dense ppl delta_ppl delta_ppl_pct kl_mean kl_p99 top1 bits_per_value "
        "held_bytes seconds versions"
    )
    assert set(expected.split()) <= set(json.loads(json.dumps(row)))


def test_figures_do_not_depend_on_the_chunk() -> None:
    from conftest import tiny_model

    model = tiny_model("llama")  # in float64, where rounding pushes no code over a boundary
    kvfold.attach(model)
    passage = torch.randint(3, 256, (1, 300), generator=torch.Generator().manual_seed(0))
    for format in ("kvfold-4", "turboquant-4"):
        rows = [evaluate_formats(model, [passage], [format], chunk=chunk)[0] for chunk in (300, 77)]
        assert rows[0].kl_mean == pytest.approx(rows[1].kl_mean, rel=1e-4)
        assert rows[0].kl_mean > 1e-5


def test_layers_that_stay_dense_have_no_error() -> None:
    from conftest import tiny_model

    model = tiny_model("gemma3")
    kvfold.attach(model)
    dense, folded = DynamicCache(config=model.config), kvfold.FoldedCache(model.config, "turboquant-4")
    for cache in (dense, folded):
        model(torch.arange(3, 203).unsqueeze(0), past_key_values=cache)
    keys, values = codec_errors(TransformersRuntime(model).compared(dense, folded))
    for error in (keys, values):
        assert [math.isnan(e) for e in error] == [True, False, True, False]


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (" \n", (), "the file is empty"),
        ("A few words.", (), "fewer than a passage of 1024"),
        (None, ("--offsets", "0,x"), "offsets = '0,x': give whole numbers"),
        (None, ("--formats", "kvfold-4,nope"), "'nope' is not known"),
    ],
)
def test_errors(tmp_path: Path, content: str | None, arguments: tuple[str, ...], message: str) -> None:
    from commands import run_kvfold

    if content is not None:
        (tmp_path / "text.txt").write_text(content, encoding="utf-8")
        arguments = (*arguments, "--text", str(tmp_path / "text.txt"))
    run = run_kvfold("eval", *arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
