"""R of the page form on MLX arrays: the counterpart of `kvfold.quant.transforms`."""

from torch import Tensor

from kvfold.kernels.mlx import mx
from kvfold.kernels.mlx.arrays import table
from kvfold.quant.transforms import AnyTransform, ChannelOrder, Hadamard, HeadMatrices, OrderedMatrix, Transform


def apply_to_query(transform: AnyTransform, q: mx.array) -> mx.array:
    """q̃ = R⁻ᵀ·q for every row of `q`, float32, (batch, heads, any, any, D)."""
    if isinstance(transform, HeadMatrices):
        return q @ _matrices(transform).swapaxes(-1, -2)
    if not isinstance(transform, Transform):
        q = mx.take_along_axis(q, _index(transform, q), axis=-1)
    if isinstance(transform, ChannelOrder):
        return q
    if isinstance(transform, Transform) and transform.general_inverse is not None:
        return q @ table(transform.general_inverse)
    return q @ _matrix(transform).T


def invert(transform: AnyTransform, y: mx.array) -> mx.array:
    """R⁻¹·y for every row of `y`, float32, (batch, heads, any, any, code_dim)."""
    if isinstance(transform, HeadMatrices):
        return y @ _matrices(transform)
    if isinstance(transform, Transform):
        if transform.general_inverse is not None:
            return y @ table(transform.general_inverse).T
        return y @ _matrix(transform)
    if isinstance(transform, OrderedMatrix):
        y = y @ _matrix(transform)
    return mx.take_along_axis(y, mx.argsort(_index(transform, y), axis=-1), axis=-1)


def _matrix(transform: Transform | OrderedMatrix) -> mx.array:
    """R, (code_dim, D)."""
    if isinstance(transform, Hadamard):
        return table(transform.signs, lambda: transform.matrix)
    return table(transform.matrix)


def _matrices(transform: HeadMatrices) -> mx.array:
    """(heads, 1, D, D), for products with (batch, heads, any, any, D)."""
    return table(transform.matrix)[:, None]


def _index(transform: ChannelOrder | OrderedMatrix, x: mx.array) -> mx.array:
    order: Tensor = (transform.order if isinstance(transform, OrderedMatrix) else transform).order
    index = table(order)[..., None, None, :]
    return index.reshape(*(1,) * (x.ndim - index.ndim), *index.shape)
