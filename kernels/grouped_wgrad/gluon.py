# R routed rows, E experts, N out features, K in features. Rows of one expert are adjacent; offs_E holds their ends.
#
#   scheduler, 1 warp         queue         producer, 1 warp           ring            2 consumers, 4 warps each
#   walks the tiles,        +-------+       copies the rows of      +--------+        each multiplies one half of
#   reads offs_E      ----> | tile  | ----> a tile's expert,  ----> | dy_RN  | ---->  the tile's rows, and stages and
#                           +-------+       BLOCK_R at a time       | x_RK   |        stores it by itself
#                               |                                   +--------+               ^
#                               +------------------------------------------------------------+
#
# One program per SM. Nothing keeps the two consumers in step, so that one stores its half of a tile while the other one
# multiplies, and the producer runs ahead of both: products hide the stores and the loads.
#
# Split into W parts of C rows or columns, dw is [W * E, C, K] or [W * E, N, C]. What is stored in one piece has 64 rows
# and columns; C is a multiple of that, so that each piece lies in one part.

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gtp_compile.kernels.hopper import (
    CONSUMER_REGISTERS,
    HELPER_REGISTERS,
    QUEUE,
    ROWS,
    TILE_FIELDS,
    barrier,
    describe,
    describe_rows,
    next_slot,
    put_tile,
    read_box,
    take_tile,
    write_box,
)

# 128 x 128 tiles leave room to stage a whole one (64 KiB in float32) beside a ring of five steps of 32 KiB.
_BLOCK_R = gl.constexpr(64)
_BLOCK_N = gl.constexpr(128)
_BLOCK_K = gl.constexpr(128)
_HALF_N = gl.constexpr(64)  # rows of a tile that one consumer owns
_CHUNK_K = gl.constexpr(64)  # columns that go through shared memory in one piece
_STAGES = gl.constexpr(5)
_BAND = gl.constexpr(4)  # row tiles that walk the columns together, so that what they share stays in the L2 cache


@gluon.jit
def _locate_tile(tile, tiles_N, tiles_K):
    """Return the expert, first row and first column of a tile: expert by expert, band by band, column by column."""
    expert = tile // (tiles_N * tiles_K)
    tile = tile % (tiles_N * tiles_K)
    band = tile // (_BAND * tiles_K)
    tile = tile % (_BAND * tiles_K)
    height = gl.minimum(tiles_N - band * _BAND, _BAND)
    return expert, (band * _BAND + tile % height) * _BLOCK_N, tile // height * _BLOCK_K


@gluon.jit
def _locate_box(dw_desc, expert, n, k, parts, SPLIT_DIM: gl.constexpr):
    """Return the coordinates in dw of a box that no part's border cuts."""
    experts = dw_desc.shape[0] // parts
    if SPLIT_DIM == 1:
        rows = dw_desc.shape[1]
        return [n // rows * experts + expert, n % rows, k]
    elif SPLIT_DIM == 2:
        columns = dw_desc.shape[2]
        return [k // columns * experts + expert, n, k % columns]
    else:
        return [expert, n, k]


@gluon.jit
def _locate_rows(offs_ptr, expert, R):
    """Return the end and the number of an expert's rows."""
    # Offsets are not checked on the host (that would synchronize); the bounds keep a wrong one inside the buffers.
    begin = gl.maximum(gl.load(offs_ptr + gl.maximum(expert - 1, 0)), 0)
    end = gl.minimum(gl.load(offs_ptr + expert), R)
    return end, gl.maximum(end - gl.where(expert > 0, begin, 0), 0)


@gluon.jit
def _schedule(dw_desc, offs_ptr, R, parts, queue, ACCUMULATE: gl.constexpr, SPLIT_DIM: gl.constexpr):
    experts = dw_desc.shape[0] // parts
    tiles_N = gl.cdiv(dw_desc.shape[1] * (parts if SPLIT_DIM == 1 else 1), _BLOCK_N)
    tiles_K = gl.cdiv(dw_desc.shape[2] * (parts if SPLIT_DIM == 2 else 1), _BLOCK_K)
    index = 0
    for tile in range(gl.program_id(0), experts * tiles_N * tiles_K, gl.num_programs(0)):
        expert, n, k = _locate_tile(tile, tiles_N, tiles_K)
        end, rows = _locate_rows(offs_ptr, expert, R)
        # Adding nothing is left out; a fresh gradient of an expert without rows has zeros to store.
        if rows > 0 or not ACCUMULATE:
            put_tile(index, queue, expert, n, k, end, rows)
            index += 1
    put_tile(index, queue, -1, 0, 0, 0, 0)


@gluon.jit
def _load(dy_desc, x_desc, ring, queue):
    dy_ring, x_ring, full, empty = ring
    nbytes: gl.constexpr = _BLOCK_R * (_BLOCK_N + _BLOCK_K) * 2
    slot = 0
    phase = 1
    index = 0
    expert, n, k, end, rows = take_tile(index, queue)
    while expert >= 0:
        for r in range(0, rows, _BLOCK_R):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, nbytes)
            row = ROWS - rows + r
            for half in gl.static_range(2):
                dy_half = dy_ring.index(slot * 2 + half)
                read_box(dy_desc, [ROWS, end, row, n + half * _HALF_N], bar, dy_half)
            read_box(x_desc, [ROWS, end, row, k], bar, x_ring.index(slot))
            slot, phase = next_slot(slot, phase, _STAGES)
        index += 1
        expert, n, k, end, rows = take_tile(index, queue)


@gluon.jit
def _store_chunk(dw_NK, buffer, dw_desc, box, ACCUMULATE: gl.constexpr):
    buffer_NK = buffer.reshape([_HALF_N, _CHUNK_K])
    if ACCUMULATE:
        dw_NK += buffer_NK.load(dw_NK.type.layout)
    buffer_NK.store(dw_NK.to(dw_desc.dtype))
    fence_async_shared()
    barrier()
    write_box(dw_desc, box, buffer)


@gluon.jit
def _zero_padding(dw_NK, n, k, size, SPLIT_DIM: gl.constexpr):
    """Put zeros behind the end of the split dimension, even where zero times NaN was summed; n, k come first."""
    layout: gl.constexpr = dw_NK.type.layout
    if SPLIT_DIM == 1:
        n_N = n + gl.arange(0, dw_NK.shape[0], gl.SliceLayout(1, layout))
        dw_NK = gl.where(gl.expand_dims(n_N < size, 1), dw_NK, 0.0)
    if SPLIT_DIM == 2:
        k_K = k + gl.arange(0, dw_NK.shape[1], gl.SliceLayout(0, layout))
        dw_NK = gl.where(gl.expand_dims(k_K < size, 0), dw_NK, 0.0)
    return dw_NK


@gluon.jit
def _halve(dw_NK):
    """Split into the left and the right columns, each in the layout of a product of that width: no data moves."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _CHUNK_K, 16])
    left, right = dw_NK.reshape([_HALF_N, 2, _CHUNK_K]).permute((0, 2, 1)).split()
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def _multiply(
    half: gl.constexpr,
    dw_desc,
    size,
    parts,
    ring,
    queue,
    staging,
    fetched,
    ACCUMULATE: gl.constexpr,
    SPLIT_DIM: gl.constexpr,
):
    dy_ring, x_ring, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_K, 16])
    left = staging.index(half * 2)
    right = staging.index(half * 2 + 1)
    slot = 0
    phase = 0
    fetches = 0
    index = 0
    expert, n, k, _, rows = take_tile(index, queue)
    while expert >= 0:
        n += half * _HALF_N
        left_box = _locate_box(dw_desc, expert, n, k, parts, SPLIT_DIM)
        right_box = _locate_box(dw_desc, expert, n, k + _CHUNK_K, parts, SPLIT_DIM)
        dw_NK = gl.zeros([_HALF_N, _BLOCK_K], gl.float32, layout)
        previous = 0
        # Halfway through the products the last tile's store is done, and there is time for the old values to arrive.
        halfway = rows // 2 // _BLOCK_R * _BLOCK_R
        for r in range(0, rows, _BLOCK_R):
            if ACCUMULATE:
                if r == halfway:
                    tma.store_wait(pendings=0)
                    barrier()
                    mbarrier.expect(fetched, _HALF_N * _BLOCK_K * 4)
                    read_box(dw_desc, left_box, fetched, left)
                    read_box(dw_desc, right_box, fetched, right)
            mbarrier.wait(full.index(slot), phase)
            dy_NR = dy_ring.index(slot * 2 + half).reshape([_BLOCK_R, _HALF_N]).permute((1, 0))
            x_RK = x_ring.index(slot).reshape([_BLOCK_R, _BLOCK_K])
            dw_NK = warpgroup_mma(dy_NR, x_RK, dw_NK, is_async=True)
            dw_NK = warpgroup_mma_wait(num_outstanding=1, deps=[dw_NK])
            barrier()
            mbarrier.arrive(empty.index(previous), count=1, pred=r > 0)
            previous = slot
            slot, phase = next_slot(slot, phase, _STAGES)
        dw_NK = warpgroup_mma_wait(num_outstanding=0, deps=[dw_NK])
        barrier()
        mbarrier.arrive(empty.index(previous), count=1, pred=rows > 0)

        if ACCUMULATE:
            mbarrier.wait(fetched, fetches & 1)
            fetches += 1
        else:
            tma.store_wait(pendings=0)
            barrier()
        left_NK, right_NK = _halve(_zero_padding(dw_NK, n, k, size, SPLIT_DIM))
        _store_chunk(left_NK, left, dw_desc, left_box, ACCUMULATE)
        _store_chunk(right_NK, right, dw_desc, right_box, ACCUMULATE)
        index += 1
        expert, n, k, _, rows = take_tile(index, queue)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["R", "parts"])
def _grouped_wgrad_gluon_kernel(
    dy_desc, x_desc, dw_desc, offs_ptr, R, parts, ACCUMULATE: gl.constexpr, SPLIT_DIM: gl.constexpr
):
    waits: gl.constexpr = mbarrier.MBarrierLayout()
    dy_ring = gl.allocate_shared_memory(dy_desc.dtype, [_STAGES * 2, 1, 1, _BLOCK_R, _HALF_N], dy_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [_STAGES, 1, 1, _BLOCK_R, _BLOCK_K], x_desc.layout)
    ring_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], waits)
    ring_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], waits)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [QUEUE * TILE_FIELDS, 1], one)
    queue_full = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], waits)
    queue_empty = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], waits)
    staging = gl.allocate_shared_memory(dw_desc.dtype, [4, 1, _HALF_N, _CHUNK_K], dw_desc.layout)
    fetched = gl.allocate_shared_memory(gl.int64, [2, 1], waits)
    for slot in gl.static_range(_STAGES):
        mbarrier.init(ring_full.index(slot), count=1)
        mbarrier.init(ring_empty.index(slot), count=2)
    for slot in gl.static_range(QUEUE):
        mbarrier.init(queue_full.index(slot), count=1)
        mbarrier.init(queue_empty.index(slot), count=3)
    for half in gl.static_range(2):
        mbarrier.init(fetched.index(half), count=1)

    ring = (dy_ring, x_ring, ring_full, ring_empty)
    queue = (fields, queue_full, queue_empty)
    size = x_desc.shape[3] if SPLIT_DIM == 2 else dy_desc.shape[3]
    # The tuples stand in the call: through a variable, constants would become values of the run.
    gl.warp_specialize(
        [
            (_multiply, (0, dw_desc, size, parts, ring, queue, staging, fetched.index(0), ACCUMULATE, SPLIT_DIM)),
            (_multiply, (1, dw_desc, size, parts, ring, queue, staging, fetched.index(1), ACCUMULATE, SPLIT_DIM)),
            (_load, (dy_desc, x_desc, ring, queue)),
            (_schedule, (dw_desc, offs_ptr, R, parts, queue, ACCUMULATE, SPLIT_DIM)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
    )


def grouped_wgrad_gluon(
    dy: Tensor, x: Tensor, offs: Tensor, dw: Tensor, *, accumulate: bool, split_dim: int = 0
) -> None:
    """Store in dw [E, N, K], or add to it, `dy_e^T @ x_e` of dy [R, N], x [R, K] and offs [E] int32.

    With split_dim, store in the parts of dw: contiguous [W, E, c, K] (1) or [W, E, N, c] (2), c a multiple of 64.
    """
    if dy.shape[0] == 0:  # nothing to describe
        if not accumulate:
            dw.zero_()
        return
    parts = dw.shape[0] if split_dim else 1
    dw = dw.flatten(0, -3)  # of every part and expert
    matrices, N, K = dw.shape
    tiles_N = triton.cdiv(N * (parts if split_dim == 1 else 1), _BLOCK_N.value)
    tiles_K = triton.cdiv(K * (parts if split_dim == 2 else 1), _BLOCK_K.value)
    tiles = matrices // parts * tiles_N * tiles_K
    programs = min(tiles, torch.cuda.get_device_properties(dw.device).multi_processor_count)
    with torch.cuda.device_of(dw):
        _grouped_wgrad_gluon_kernel[(programs,)](
            describe_rows(dy, _BLOCK_R.value, _HALF_N.value),
            describe_rows(x, _BLOCK_R.value, _BLOCK_K.value),
            describe(dw, [matrices, N, K], list(dw.stride()), [1, _HALF_N.value, _CHUNK_K.value]),
            offs.contiguous(),
            dy.shape[0],
            parts,
            ACCUMULATE=accumulate,
            SPLIT_DIM=split_dim,
            num_warps=4,
        )
