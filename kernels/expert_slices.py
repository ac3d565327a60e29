"""Rows of each expert, read on the host: for the CPU references only, as it would synchronize a GPU."""

from itertools import pairwise

from torch import Tensor


def expert_slices(op: str, offs: Tensor, rows: int) -> list[slice]:
    """Return one slice of the routed rows per expert.

    Raises:
        ValueError: `offs` decreases, starts below zero, or ends past `rows`.
    """
    edges = [0, *offs.tolist()]
    for expert, (begin, end) in enumerate(pairwise(edges)):
        if not begin <= end <= rows:
            raise ValueError(
                f"{op}: offs must rise from 0 to at most the number of rows, {rows}, got {begin} -> {end} at expert "
                f"{expert}; pass cumulative ends, e.g. counts.cumsum(0, dtype=torch.int32)"
            )
    return [slice(begin, end) for begin, end in pairwise(edges)]
