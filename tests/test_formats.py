"""Formats: distortion, bytes, names, errors; and the page form in full generality."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.formats import FORMATS, FormatPair, get_format, get_formats
from kvfold.formats.base import PAGE_WINDOW
from kvfold.formats.page import PageForm, Pages, TokenCodes, level_table
from kvfold.formats.turboquant import TurboQuant
from kvfold.quant.balance import balance
from kvfold.quant.codebooks import distortion, sphere_coordinate, sphere_levels
from kvfold.quant.packing import Lanes
from kvfold.quant.transforms import Matrix


def _nmse(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_turboquant_distortion_is_exact(d: int, bits: int) -> None:
    """Within 1 % of the value that theory gives for Gaussian vectors."""
    x = torch.randn(2**21 // d, d, generator=torch.Generator().manual_seed(bits))
    fmt = TurboQuant(head_dim=d, bits=bits)
    exact = d * distortion(sphere_coordinate(d), np.array(sphere_levels(bits, d)))
    assert _nmse(x, fmt.unfold(fmt.fold(x))) == pytest.approx(exact, rel=0.01)


def test_turboquant_bytes() -> None:
    """66 and 50 bytes a vector at d = 128: codes and a float16 norm; these formats have no page metadata."""
    for name, size in (("turboquant-4", 66), ("turboquant-3", 50), ("turboquant-2", 34), ("turboquant-8", 130)):
        page = get_format(name, 128).fold(torch.randn(3, 640, 128))
        assert page.nbytes == 3 * 640 * size
        assert get_format(name, 128).metadata_bytes_per_page == 0


def test_kvfold_bytes() -> None:
    """The same 66 bytes at d = 128, and a centre of 256 bytes for each page of 64."""
    fmt = get_format("centred-4", 128)
    assert fmt.fold(torch.randn(640, 128)).nbytes == 640 * 66 + 10 * 256
    assert fmt.metadata_bytes_per_page == 256
    assert fmt.bytes_per_vector == 70


def test_centred_pages_do_not_pay_for_what_vectors_share() -> None:
    common = 30 * torch.randn(1, 1, 128)
    x = common + torch.randn(4, 640, 128)
    own = (x - common).square().sum()
    errors = {
        name: ((fmt := get_format(name, 128)).unfold(fmt.fold(x)) - x).square().sum() / own
        for name in ("centred-4", "turboquant-4")
    }
    assert errors["centred-4"] < 0.01  # as if there were no common part
    assert errors["turboquant-4"] > 1  # more error than signal


def test_kvarn_bytes() -> None:
    """Those of the method's authors, for tiles of 128 at d = 128. Beside codes, keys have a number a token and two a
    channel, values two a token and one a channel."""
    x = torch.randn(256, 128)
    assert get_format("kvarn-4@128", 128).fold(x).nbytes == 256 * 64 + 256 * 2 + 2 * 128 * 4
    assert get_format("kvarn-2@128", 128, lanes="channels").fold(x).nbytes == 256 * 32 + 256 * 4 + 2 * 128 * 2


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
def test_kvarn_makes_tokens_and_channels_even(lanes: Lanes) -> None:
    """Scales of tokens and channels that anything was multiplied by cost next to nothing."""
    generator = torch.Generator().manual_seed(0)
    fmt = get_format("kvarn-4", 64, lanes=lanes)
    y = torch.randn(4, 64, 64, generator=generator)
    tokens, channels = (torch.randn(4, *shape, generator=generator).exp() for shape in ((64, 1), (1, 64)))
    own = [fmt.form.transform.invert(x) for x in (y, y * tokens * channels)]
    plain, uneven = (fmt.form.transform.apply(fmt.unfold(fmt.fold(x))) for x in own)
    assert _nmse(y, uneven / (tokens * channels)) < 1.1 * _nmse(y, plain)
    assert _nmse(y, plain) < 0.015


def test_balance_against_its_definition() -> None:
    """Rows and columns end with equal deviations, and a state that was more even is not given up."""
    y = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 9, 32)
    s, channel_scale = balance(y, 16)
    even = y / (s * channel_scale)
    for dim in (-1, -2):
        deviation = even.std(dim, correction=0)
        assert (deviation / deviation.mean(-1, keepdim=True)).sub(1).abs().max() < 0.02
    assert s.log().mean(-2).abs().max() < 1e-5
    assert channel_scale.log().mean(-1).abs().max() < 1e-5
    assert all((scale == 1).all() for scale in balance(torch.zeros(1, 16, 16), 3))


@pytest.mark.parametrize("lanes", ["tokens", "channels"])
@pytest.mark.parametrize("d", [8, 40, 64, 80, 96, 128, 192, 256, 512, 576])
@pytest.mark.parametrize("name", FORMATS)
def test_any_head_dim_and_any_number_of_tokens(name: str, d: int, lanes: Lanes) -> None:
    fmt = get_format(name, d, lanes=lanes)
    bounds = {16: 1e-7, 8: 1e-3, 6: 2e-3, 5: 6e-3, 4: 0.02, 3: 0.06, 2: 0.17, 1: 0.45}
    bound = np.mean([bounds[b] for b in fmt.form.bits or (16,)])
    generator = torch.Generator().manual_seed(d)
    for tokens in (1, 63, 64, 65, 150):
        rows = max(64 // tokens, 4)  # enough for the error to be near its mean
        x = torch.randn(rows, tokens, d, generator=generator)
        page = fmt.fold(x)
        assert page.tokens == tokens
        y = fmt.unfold(page)
        assert y.shape == x.shape
        # A page of one centred token is its centre, exact to float16.
        assert _nmse(x, y) < bound


def test_lanes_change_where_bits_lie_and_nothing_else() -> None:
    x = torch.randn(128, 64)
    keys, values = (get_format("centred-4", 64, lanes=lanes) for lanes in ("tokens", "channels"))
    assert not torch.equal(keys.fold(x).code, values.fold(x).code)
    assert torch.equal(keys.unfold(keys.fold(x)), values.unfold(values.fold(x)))


@pytest.mark.parametrize("name", FORMATS)
def test_zero_and_tiny_and_huge_vectors(name: str) -> None:
    fmt = get_format(name, 64)
    assert torch.equal(fmt.unfold(fmt.fold(torch.zeros(70, 64))), torch.zeros(70, 64))
    for size in (1e-4, 1e-2, 1e3):
        x = size * torch.randn(128, 64)
        assert _nmse(x, fmt.unfold(fmt.fold(x))) < 0.2


@pytest.mark.parametrize("name", FORMATS)
def test_folding_is_deterministic_and_ignores_strides(name: str) -> None:
    x = torch.randn(64, 3, 128).transpose(0, 1)
    fmt = get_format(name, 128)
    assert torch.equal(fmt.fold(x).code, fmt.fold(x.contiguous()).code)


@given(
    head_dim=st.sampled_from([16, 48, 64]),
    groups=st.sampled_from([1, 2]),
    parts=st.sets(st.sampled_from(["scale", "offset", "centre", "channel_scale"])),
    lanes=st.sampled_from(["tokens", "channels"]),
    data=st.data(),
)
def test_page_form_stands_for_its_formula(
    head_dim: int, groups: int, parts: set[str], lanes: Lanes, data: st.DataObject
) -> None:
    """x̂ = R⁻¹·(z + a + s·S ⊙ lut[code]), with mixed bits and any invertible R, element by element; and x̂ = R⁻¹·(s·z +
    a·S + s·S ⊙ lut[code])."""
    scaled_shifts = groups == 1 and data.draw(st.booleans())
    bits = tuple(data.draw(st.lists(st.integers(1, 8), min_size=head_dim // 16, max_size=head_dim // 16)))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    matrix = torch.linalg.qr(torch.randn(head_dim, head_dim))[0] * torch.linspace(0.5, 2, head_dim)
    lut = level_table({b: tuple(torch.randn(2**b).tolist()) for b in range(1, 9)}, bits)
    form = PageForm(
        head_dim, 16, bits, lut, Matrix(matrix, torch.linalg.inv(matrix)), lanes,
        (head_dim // groups,) * groups if groups > 1 else (), scaled_shifts=scaled_shifts,
    )  # fmt: skip
    code = (torch.rand(2, 16, head_dim) * 2.0 ** torch.tensor(bits).repeat_interleave(16)).to(torch.uint8)
    tokens = TokenCodes(
        code=code,
        scale=torch.randn(2, 16, groups).half() if "scale" in parts else None,
        offset=torch.randn(2, 16, groups).half() if {"scale", "offset"} <= parts else None,
        centre=torch.randn(2, head_dim).half() if "centre" in parts else None,
        channel_scale=torch.randn(2, head_dim).half() if "channel_scale" in parts else None,
    )
    unfolded = form.unfold(form.pack(tokens))
    inverse = torch.linalg.inv(matrix.double())
    n, t = 1, data.draw(st.integers(0, 15))
    y = torch.zeros(head_dim, dtype=torch.float64)
    for c in range(head_dim):
        g = c // (head_dim // groups)
        level = lut[c // 16, code[n, t, c].item()].double()
        spread = 1.0 if tokens.channel_scale is None else tokens.channel_scale[n, c].double()
        scale = 1.0 if tokens.scale is None else tokens.scale[n, t, g].double()
        y[c] = scale * spread * level
        if tokens.offset is not None:
            y[c] += tokens.offset[n, t, g].double() * (spread if scaled_shifts else 1)
        if tokens.centre is not None:
            y[c] += tokens.centre[n, c].double() * (scale if scaled_shifts else 1)
    torch.testing.assert_close(unfolded[16 * n + t].double(), inverse @ y, atol=1e-4, rtol=1e-4)


def test_keys_and_values_compose() -> None:
    pair = get_formats("centred-4:turboquant-3", 192, 128)
    assert (pair.keys.bits, pair.keys.head_dim, pair.keys.lanes) == (4, 192, "tokens")
    assert (pair.values.bits, pair.values.head_dim, pair.values.lanes) == (3, 128, "channels")
    assert pair.window == PAGE_WINDOW  # the wider window
    assert not pair.folds_by_token
    assert get_formats("turboquant-3", 64, 64) == FormatPair(
        get_format("turboquant-3", 64), get_format("turboquant-3", 64, lanes="channels")
    )


def test_errors_name_argument_value_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"format = 'nope' is not known: choose one of near-lossless, .*kvfold-4, "):
        kvfold.get_format("nope", 64)
    with pytest.raises(ValueError, match="is a pair of formats"):
        kvfold.get_format("centred-4:centred-4", 64)
    with pytest.raises(ValueError, match="one name for both, or keys:values"):
        kvfold.get_formats("a:b:c", 64, 64)
    for head_dim in (0, 4, 65, 2048):
        with pytest.raises(ValueError, match=f"head_dim = {head_dim}: .* multiples of 8 from 8 to 1024"):
            get_format("centred-4", head_dim)
    for bits in (0, 9):
        with pytest.raises(ValueError, match=f"bits = {bits}: a code has 1 to 8 bits"):
            TurboQuant(head_dim=64, bits=bits)
    with pytest.raises(ValueError, match="page_size = 40"):
        TurboQuant(head_dim=64, bits=4, page_size=40)
    fmt = get_format("turboquant-4", 64)
    for bad in (torch.randn(3, 32), torch.randn(64), torch.randn(0, 64)):
        with pytest.raises(ValueError, match="x has shape"):
            fmt.fold(bad)
    with pytest.raises(TypeError, match=r"x has dtype torch.int64"):
        fmt.fold(torch.zeros(3, 64, dtype=torch.int64))
    for bad_value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or an infinity"):
            fmt.fold(torch.full((1, 64), bad_value))
    with pytest.raises(ValueError, match="float16"):
        fmt.fold(torch.full((1, 64), 60_000.0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("turboquant-9", "bits go from 1 to 8"),
        ("centred-1+qjl", r"bits go from 2 \(a residual takes one of them\) to 8"),
        ("centred-4+nope", "the residual is one of qjl, srht, sign"),
        ("centred-4@40", "a page is a multiple of 16 tokens"),
        ("centred-4@32:turboquant-4", "both name the same page size"),
        ("turboquant", "is not known"),
        ("float16+qjl", "is not known"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvfold.get_formats(name, 64, 64)


def test_residuals_take_multiples_of_16() -> None:
    with pytest.raises(ValueError, match="head_dim = 40: a residual takes"):
        get_format("centred-4+qjl", 40)


@pytest.mark.parametrize(
    ("residual", "bits", "expected"),
    [
        ("qjl", 4, 0.0523),
        ("srht", 4, 0.0193),
        ("sign", 4, 0.0115),
        ("qjl", 3, 0.180),
        ("srht", 3, 0.0655),
        ("sign", 3, 0.0404),
        ("qjl", 2, 0.557),
        ("srht", 2, 0.202),
        ("sign", 2, 0.126),
    ],
)
@pytest.mark.parametrize("lanes", ["tokens", "channels"])
def test_residual_errors_are_those_of_theory(residual: str, bits: int, expected: float, lanes: Lanes) -> None:
    """d times the variance of inner products at d = 128, by the total number of bits; the codes take one less."""
    fmt = get_format(f"turboquant-{bits}+{residual}", 128, lanes=lanes)
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(bits))
    folded = fmt.fold(x)
    assert _nmse(x, fmt.unfold(folded)) == pytest.approx(expected, rel=0.03)
    assert fmt.bytes_per_vector == 16 * bits + 4  # two float16 scales


def test_qjl_is_unbiased_and_the_sign_rule_is_not() -> None:
    x = torch.randn(20_000, 128, generator=torch.Generator().manual_seed(0))
    slope = {}
    for residual in ("qjl", "srht", "sign"):
        fmt = get_format(f"turboquant-2+{residual}", 128)
        slope[residual] = ((fmt.unfold(fmt.fold(x)) * x).sum() / x.square().sum()).item()
    assert slope["qjl"] == pytest.approx(1, abs=0.005)
    assert slope["srht"] == pytest.approx(1, abs=0.005)
    assert slope["sign"] < 0.9


def test_float16_rounds_and_nothing_else() -> None:
    x = torch.randn(3, 100, 64) * torch.tensor([1e-3, 1.0, 1e6]).view(3, 1, 1)
    fmt = get_format("float16", 64)
    y = fmt.unfold(fmt.fold(x))
    assert torch.equal(y[1], x[1].half().float())
    torch.testing.assert_close(y, x, rtol=2**-11, atol=1e-7)


def test_pages_count_all_their_bytes() -> None:
    page = get_format("centred-4", 64).fold(torch.randn(2, 100, 64))
    assert isinstance(page, Pages)
    assert page.nbytes == sum(t.numel() * t.element_size() for _, t in page.tensors())
    assert {name for name, _ in page.tensors()} == {"code", "scale", "centre"}
