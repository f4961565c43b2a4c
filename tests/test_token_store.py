"""The token-by-token store."""

import pytest
import torch

from kvfold import TokenStore
from kvfold.formats import PAIRS, get_formats

NAMES = ("safe-lowbit", "balanced", "experimental-max", "safe-lowbit-lloyd", "balanced-lloyd", "bold", "kvfold-4")


@pytest.mark.parametrize("name", NAMES)
def test_append_read_evict_clear(name: str) -> None:
    """Tokens one by one are those of one append; what is read is near what was written; eviction leaves the rest."""
    torch.manual_seed(0)
    one, many = (TokenStore(name, layers=2, kv_heads=3, head_dim=64) for _ in range(2))
    key, value = torch.randn(2, 3, 300, 64)
    for layer in (0, 1):
        for t in range(300):
            one.append(layer, key[:, t], value[:, t])
        many.append(layer, key, value)
    assert one.length(1) == 300
    for x, read, again in ((key, one.keys(1), many.keys(1)), (value, one.values(1), many.values(1))):
        assert (read != again).float().mean() < 0.01  # a coordinate on the edge of two codes may fall to either
        assert 0 < ((read - x).square().sum() / x.square().sum()).item() < (0.2 if name == "bold" else 0.07)
    assert torch.equal(one.keys(0, 20, 50), one.keys(0)[:, 20:50])
    kept = one.values(0, 0, 130)
    one.evict(130)
    assert [one.length(layer) for layer in (0, 1)] == [130, 130]
    torch.testing.assert_close(one.values(0), kept, atol=2e-3, rtol=0)  # kvfold's last page is dense again, in float16
    one.append(0, key[:, 130:], value[:, 130:])
    assert one.length(0) == 300
    one.clear()
    assert one.length(0) == 0
    assert one.keys(0).shape == (3, 0, 64)


@pytest.mark.parametrize("name", ["balanced", "experimental-max"])
def test_memory_is_what_the_format_says(name: str) -> None:
    store = TokenStore(name, layers=2, kv_heads=4, head_dim=128)
    for layer in (0, 1):
        store.append(layer, torch.randn(4, 640, 128), torch.randn(4, 640, 128))
    pair = get_formats(PAIRS[name], 128, 128)
    vector = pair.keys.bytes_per_vector + pair.values.bytes_per_vector
    report = store.report()
    assert report.layers[0].held_bytes == 4 * 640 * vector + 8  # and the row's index
    assert report.held_bytes == pytest.approx(2 * 4 * 640 * vector + report.shared_bytes, abs=20)
    assert report.values == 2 * 2 * 4 * 640 * 128


def test_what_it_refuses() -> None:
    store = TokenStore("balanced", layers=1, kv_heads=2, head_dim=64)
    x = torch.randn(2, 64)
    with pytest.raises(ValueError, match="layer = 1: this store has layers 0 to 0"):
        store.append(1, x, x)
    with pytest.raises(ValueError, match=r"value has shape \(3, 64\): give \(2, 64\), or \(2, tokens, 64\)"):
        store.append(0, x, torch.randn(3, 64))
    with pytest.raises(ValueError, match=r"key at position 0 .* is (-inf|inf|nan)"):
        store.append(0, x / 0, x)
    assert store.length(0) == 0
    store.append(0, x, x)
    with pytest.raises(ValueError, match="start = 0, stop = 2: layer 0 holds 1 tokens"):
        store.keys(0, 0, 2)
    with pytest.raises(ValueError, match="position = -1"):
        store.evict(-1)
    with pytest.raises(ValueError, match="head_dim = 80: uniform codes take multiples of 32"):
        TokenStore("balanced", layers=1, kv_heads=2, head_dim=80)
    with pytest.raises(ValueError, match="layers = 0"):
        TokenStore("balanced", layers=0, kv_heads=2, head_dim=64)
