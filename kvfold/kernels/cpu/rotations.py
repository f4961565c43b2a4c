"""Rotations as the kernels in C++ take them."""

from kvfold.kernels.cpu import module as cpu
from kvfold.quant.transforms import AnyTransform, ChannelOrder, Hadamard, HeadMatrices, Matrix, OrderedMatrix


def rotation(transform: AnyTransform) -> cpu.Rotation:
    """A transform as the CPU kernels know it: by addresses, so the transform must outlive it."""
    if isinstance(transform, ChannelOrder):
        return cpu.Rotation.order(*_order(transform))
    if isinstance(transform, OrderedMatrix):
        return cpu.Rotation.ordered_matrix(*_order(transform.order), transform.matrix.data_ptr())
    if isinstance(transform, HeadMatrices):
        matrix = transform.matrix
        return cpu.Rotation.head_matrices(matrix.shape[-1], matrix.data_ptr(), matrix.stride(0))
    if isinstance(transform, Hadamard):
        signs, mix = transform.signs, transform.mix
        return cpu.Rotation.hadamard(signs.shape[0], signs.data_ptr(), 0 if mix is None else mix.data_ptr())
    assert isinstance(transform, Matrix)
    matrix, inverse = transform.matrix, transform.general_inverse
    code_dim, dim = matrix.shape
    return cpu.Rotation.matrix(dim, code_dim, matrix.data_ptr(), 0 if inverse is None else inverse.data_ptr())


def _order(order: ChannelOrder) -> tuple[int, int, int, int]:
    """Length, address and strides from row to row and head to head."""
    by_row, by_head = (0, 0, *order.order.stride()[:-1])[-2:]
    return order.order.shape[-1], order.order.data_ptr(), by_row, by_head
