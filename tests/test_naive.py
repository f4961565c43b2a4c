"""The formula of attention over folded rows, against textbook attention one query at a time."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvfold.attention import naive
from kvfold.cache.batch import Appended
from kvfold.cache.config import LayerConfig
from kvfold.cache.layer import LayerCache


def _textbook(
    new: Appended, q: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Textbook attention in float64 over what each query reads, one query at a time; 0 for padding.

    By the cache's rule a query reads the sinks dense; a page folded once `recent` tokens follow it, or if it was
    folded before these columns came; all else dense. With formats that fold by token, everything is folded.
    """
    repeat = q.shape[1] // key.shape[1]
    out = torch.zeros(*q.shape[:3], value.shape[-1], dtype=torch.float64)
    for group, dense in zip(new.layer.groups, new.dense, strict=True):
        rows, batch_rows = group.rows, group.batch_rows
        first, recent, size = rows.window.sinks, rows.window.recent, rows.page_size
        raw = [x[batch_rows, :, group.padding :].double() for x in (key, value)]
        folded = [x.double() for x in rows.unfold()]
        for i in range(max(group.padding - new.first_column, 0), q.shape[2]):
            t = new.first_column + i - group.padding
            if rows.formats.folds_by_token:
                stop = t + 1
            else:
                assert dense is not None
                stop = max(first + (t + 1 - recent - first) // size * size, dense.start)
            k, v = (
                torch.cat((x[:, :, :first], y[:, :, first:stop], x[:, :, max(stop, first) : t + 1]), 2)[:, :, : t + 1]
                for x, y in zip(raw, folded, strict=True)
            )
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
            scores = (q[batch_rows, :, i, None].double() * k).sum(-1) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double().view(1, -1, 1).expand(len(scores), -1, 1)), -1)
            p = scores.softmax(-1)[..., : t + 1]
            out[batch_rows, :, i] = (p.unsqueeze(-1) * v).sum(2)
    return out


@pytest.mark.parametrize("padding", [None, [0, 37], [200, 3]])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": True}])
@pytest.mark.parametrize("format", ["centred-4", "turboquant-4", "turboquant-4:centred-4"])
def test_reads_by_the_rule(format: str, options: dict[str, float], padding: Sequence[int] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(chunks := (150, 1, 1, 90, 1, 64, 1))
    query = torch.randn(2, 4, tokens, 64, generator=generator)
    key, value = torch.randn(2, 2, 2, tokens, 64, generator=generator).half().float()  # kept as they are
    softcap, sinks = options.get("softcap"), torch.randn(4, generator=generator) if "sinks" in options else None
    cache, done = LayerCache(LayerConfig(format)), 0
    for n in chunks:
        part = slice(done, done + n)
        new = cache.append(key[:, :, part], value[:, :, part], padding)
        expected = _textbook(new, query[:, :, part], key, value, 0.125, softcap, sinks)
        for group, dense in zip(cache.groups, new.dense, strict=True):
            own = group.own(query[:, :, part], done)
            got = naive.attend_rows(own, group.rows, dense, scaling=0.125, softcap=softcap, sink_logits=sinks)
            torch.testing.assert_close(got, expected[group.batch_rows, :, n - own.shape[2] :], atol=1e-9, rtol=0)
        done += n


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_a_mask_decides_alone(kind: torch.dtype) -> None:
    """Even over causality; a query that is barred from all gets 0."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 5, 64, generator=generator)
    key, value = torch.randn(2, 1, 2, 40, 64, generator=generator).half().double()
    cache = LayerCache(LayerConfig("kvfold-4"))  # all dense so far
    new = cache.append(key, value)
    allowed = torch.rand(1, 1, 5, 40, generator=generator) < 0.5
    allowed[..., 2, :] = False
    mask = allowed if kind == torch.bool else torch.zeros(allowed.shape, dtype=kind).masked_fill(~allowed, -torch.inf)
    got = naive.attend_rows(query, cache.groups[0].rows, new.dense[0], scaling=0.5, mask=mask)
    scores = (query.double() @ key.mT * 0.5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(got, scores.softmax(-1).nan_to_num(0.0) @ value)
    assert not got[:, :, 2].any()
