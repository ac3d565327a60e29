"""The tile sizes of one build of a grouped kernel."""

from dataclasses import dataclass

__all__ = ["TileConfig"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile sizes over routed rows, out features and in features.

    Attributes:
        block_r, block_n, block_k: sizes of a tile.
        band: how many tiles along the first output dim walk the second one together, so that what they share stays in
            the L2 cache.
        num_warps, num_stages: as Triton means them.
    """

    block_r: int
    block_n: int
    block_k: int
    band: int
    num_warps: int
    num_stages: int
