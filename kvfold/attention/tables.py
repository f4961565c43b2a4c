"""Tables that kernels of all devices read."""

from kvfold.quant.packing import TILE


def group_of_tiles(groups: tuple[int, ...]) -> list[int]:
    """The scale group of each 16 channels, by the channels of each group, multiples of 16."""
    return [group for group, width in enumerate(groups) for _ in range(width // TILE)]
