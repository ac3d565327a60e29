"""Tile table of the grouped wgrad kernel."""

import torch

from gtp_compile.kernels.tiles import TileConfig

# Half precision: a 128 x 128 tile with three stages takes 96 KiB of shared memory. That fits the smallest limit from
# Ampere on (99 KiB), and two programs share a Hopper SM, so that one stores while the other multiplies.
_HALF = TileConfig(block_r=64, block_n=128, block_k=128, band=8, num_warps=8, num_stages=3)

# IEEE float32 runs on FMA units, not on tensor cores: registers, not shared memory, bound the tile.
_FLOAT32 = TileConfig(block_r=16, block_n=64, block_k=64, band=8, num_warps=4, num_stages=2)

_CONFIGS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _FLOAT32}


def grouped_wgrad_config(dtype: torch.dtype) -> TileConfig:
    """Return the tile sizes for operands of `dtype`, the same on every rank and in every run."""
    return _CONFIGS[dtype]
