"""What the Gluon kernels for Hopper share: boxes that end with an expert's rows, a queue of tiles between warps."""

from functools import cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "CONSUMER_REGISTERS",
    "HELPER_REGISTERS",
    "QUEUE",
    "ROWS",
    "TILE_FIELDS",
    "barrier",
    "describe",
    "describe_rows",
    "next_slot",
    "put_tile",
    "read_box",
    "swizzled",
    "take_tile",
    "write_box",
]

# The second name is that of Triton 3.6.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
read_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
write_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

QUEUE = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(208)
HELPER_REGISTERS = gl.constexpr(40)
TILE_FIELDS = gl.constexpr(5)  # expert, first row and column, end and number of the expert's rows
ROWS = gl.constexpr(1 << 30)  # more rows than any operand has


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    wraps = slot == STAGES - 1
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def put_tile(index, queue, expert, n, k, end, rows):
    fields, full, empty = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = index % QUEUE
    mbarrier.wait(empty.index(slot), (index // QUEUE & 1) ^ 1)
    at = slot * TILE_FIELDS
    fields.index(at).store(gl.full([1], expert, gl.int32, layout))
    fields.index(at + 1).store(gl.full([1], n, gl.int32, layout))
    fields.index(at + 2).store(gl.full([1], k, gl.int32, layout))
    fields.index(at + 3).store(gl.full([1], end, gl.int32, layout))
    fields.index(at + 4).store(gl.full([1], rows, gl.int32, layout))
    barrier()
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def take_tile(index, queue):
    """Return the fields of the next tile; its expert is -1 when there is none."""
    fields, full, empty = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = index % QUEUE
    mbarrier.wait(full.index(slot), index // QUEUE & 1)
    at = slot * TILE_FIELDS
    expert = gl.max(fields.index(at).load(layout), 0)
    n = gl.max(fields.index(at + 1).load(layout), 0)
    k = gl.max(fields.index(at + 2).load(layout), 0)
    end = gl.max(fields.index(at + 3).load(layout), 0)
    rows = gl.max(fields.index(at + 4).load(layout), 0)
    barrier()
    mbarrier.arrive(empty.index(slot), count=1)
    return expert, n, k, end, rows


def describe_rows(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe [rows, columns] boxes of a matrix that end with any given row.

    The coordinate (ROWS, end, ROWS - count + r, column) is row `end - count + r`: ROWS steps along the first and along
    the third dimension are 2^64 elements together, and addresses wrap there. Rows from `end` on lie outside the third
    dimension, so that TMA does not read them and fills in zeros.
    """
    stride = matrix.stride(0)
    shape = [0x7FFF0000, 0x7FFF0000, ROWS.value, matrix.shape[1]]
    return describe(matrix, shape, [2**34 - stride, stride, stride, 1], [1, 1, rows, columns])


def describe(tensor: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, shape, strides, box, swizzled(tensor.itemsize, len(box)))


@cache
def swizzled(itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, element_bitwidth=8 * itemsize, rank=rank)
