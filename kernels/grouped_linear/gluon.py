# R routed rows, E experts, N out features, K in features. Rows of one expert are adjacent; offs_E holds their ends.
#
#   scheduler, 1 warp         queue         producer, 1 warp           ring            2 consumers, 4 warps each
#   walks the experts,      +-------+       copies x and the         +--------+        each multiplies 64 of the tile's
#   cuts their rows   ----> | tile  | ----> expert's weight,   ----> | x_RK   | ---->  128 rows, and stages and stores
#   into tiles              +-------+       BLOCK_K at a time        | w_NK   |        them by itself
#                               |                                    +--------+               ^
#                               +-------------------------------------------------------------+
#
# The rows past the last expert's are tiles of one expert more, which multiply nothing and store zeros. TMA clips x and
# y at an expert's end. The weight lies in W parts, as an all-gather leaves it, [W, E, c, K] or [W, E, N, c], with
# either of the last two dimensions innermost; whole it is one part.

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

_BLOCK_R = gl.constexpr(128)
_HALF_R = gl.constexpr(64)  # rows of a tile that one consumer owns
_BLOCK_N = gl.constexpr(128)
_BLOCK_K = gl.constexpr(64)
_PIECE_N = gl.constexpr(64)  # out features that lie in one part, where those are cut
_STAGES = gl.constexpr(6)
_BAND = gl.constexpr(8)  # row tiles that walk the columns together, so that what they share stays in the L2 cache


@gluon.jit
def _schedule(offs_ptr, R, E, N, queue):
    tiles_N = gl.cdiv(N, _BLOCK_N)
    index = 0
    expert = 0
    before = 0  # tiles of the experts before this one
    # Offsets are not checked on the host (that would synchronize); the bounds keep a wrong one inside the buffers.
    begin = 0
    end = gl.minimum(gl.load(offs_ptr), R)
    tile = gl.program_id(0)
    while expert <= E:
        rows = gl.maximum(end - begin, 0)
        tiles_R = gl.cdiv(rows, _BLOCK_R)
        if tile < before + tiles_R * tiles_N:
            local = tile - before
            band = local // (_BAND * tiles_N)
            local = local % (_BAND * tiles_N)
            height = gl.minimum(tiles_R - band * _BAND, _BAND)
            put_tile(
                index,
                queue,
                expert,
                (band * _BAND + local % height) * _BLOCK_R,
                local // height * _BLOCK_N,
                end,
                rows,
            )
            index += 1
            tile += gl.num_programs(0)
        else:
            before += tiles_R * tiles_N
            begin = gl.maximum(end, 0)
            expert += 1
            end = gl.minimum(gl.load(offs_ptr + gl.minimum(expert, E - 1)), R)
            end = gl.where(expert < E, end, R)
    put_tile(index, queue, -1, 0, 0, 0, 0)


@gluon.jit
def _load(
    x_desc,
    weight_desc,
    E,
    K,
    ring,
    queue,
    SPLIT_DIM: gl.constexpr,
    K_INNERMOST: gl.constexpr,
):
    x_ring, weight_ring, full, empty = ring
    nbytes: gl.constexpr = (_BLOCK_R + _BLOCK_N) * _BLOCK_K * 2
    pieces: gl.constexpr = _BLOCK_N // _PIECE_N if SPLIT_DIM == 1 else 1
    size: gl.constexpr = _BLOCK_N // pieces
    chunk = weight_desc.shape[2 if (SPLIT_DIM == 1) == K_INNERMOST else 3]
    slot = 0
    phase = 1
    index = 0
    expert, r, n, end, rows = take_tile(index, queue)
    while expert >= 0:
        row = ROWS - rows + r
        for k in range(0, gl.where(expert < E, K, 0), _BLOCK_K):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            mbarrier.expect(bar, nbytes)
            for half in gl.static_range(2):
                read_box(x_desc, [ROWS, end, row + half * _HALF_R, k], bar, x_ring.index(slot * 2 + half))
            for piece in gl.static_range(pieces):
                part = 0
                out = n + piece * size
                inner = k
                if SPLIT_DIM == 1:
                    part = out // chunk
                    out = out % chunk
                if SPLIT_DIM == 2:
                    part = k // chunk
                    inner = k % chunk
                if K_INNERMOST:
                    buffer = weight_ring.index(slot).slice(piece * size, size, 2)
                    read_box(weight_desc, [part, expert, out, inner], bar, buffer)
                else:
                    buffer = weight_ring.index(slot).slice(piece * size, size, 3)
                    read_box(weight_desc, [part, expert, inner, out], bar, buffer)
            slot, phase = next_slot(slot, phase, _STAGES)
        index += 1
        expert, r, n, end, rows = take_tile(index, queue)


@gluon.jit
def _multiply(
    half: gl.constexpr,
    y_desc,
    bias_ptr,
    E,
    N,
    K,
    ring,
    queue,
    staging,
    K_INNERMOST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    x_ring, weight_ring, full, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK_N, 16])
    buffer = staging.index(half)
    slot = 0
    phase = 0
    index = 0
    expert, r, n, end, rows = take_tile(index, queue)
    while expert >= 0:
        y_RN = gl.zeros([_HALF_R, _BLOCK_N], gl.float32, layout)
        previous = 0
        features = gl.where(expert < E, K, 0)
        for k in range(0, features, _BLOCK_K):
            mbarrier.wait(full.index(slot), phase)
            x_RK = x_ring.index(slot * 2 + half).reshape([_HALF_R, _BLOCK_K])
            if K_INNERMOST:
                weight_KN = weight_ring.index(slot).reshape([_BLOCK_N, _BLOCK_K]).permute((1, 0))
            else:
                weight_KN = weight_ring.index(slot).reshape([_BLOCK_K, _BLOCK_N])
            y_RN = warpgroup_mma(x_RK, weight_KN, y_RN, is_async=True)
            y_RN = warpgroup_mma_wait(num_outstanding=1, deps=[y_RN])
            barrier()
            mbarrier.arrive(empty.index(previous), count=1, pred=k > 0)
            previous = slot
            slot, phase = next_slot(slot, phase, _STAGES)
        y_RN = warpgroup_mma_wait(num_outstanding=0, deps=[y_RN])
        barrier()
        mbarrier.arrive(empty.index(previous), count=1, pred=features > 0)
        if HAS_BIAS:
            n_N = n + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias_N = gl.load(bias_ptr + expert.to(gl.int64) * N + n_N, mask=(n_N < N) & (expert < E), other=0.0)
            y_RN += bias_N.to(gl.float32)[None, :]
        tma.store_wait(pendings=0)
        barrier()
        buffer.reshape([_HALF_R, _BLOCK_N]).store(y_RN.to(y_desc.dtype))
        fence_async_shared()
        barrier()
        write_box(y_desc, [ROWS, end, ROWS - rows + r + half * _HALF_R, n], buffer)
        index += 1
        expert, r, n, end, rows = take_tile(index, queue)
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["R"])
def _grouped_linear_gluon_kernel(
    x_desc,
    weight_desc,
    y_desc,
    offs_ptr,
    bias_ptr,
    R,
    E,
    N,
    K,
    SPLIT_DIM: gl.constexpr,
    K_INNERMOST: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    waits: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [_STAGES * 2, 1, 1, _HALF_R, _BLOCK_K], x_desc.layout)
    box: gl.constexpr = [_BLOCK_N, _BLOCK_K] if K_INNERMOST else [_BLOCK_K, _BLOCK_N]
    weight_ring = gl.allocate_shared_memory(weight_desc.dtype, [_STAGES, 1, 1, box[0], box[1]], weight_desc.layout)
    ring_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], waits)
    ring_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], waits)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [QUEUE * TILE_FIELDS, 1], one)
    queue_full = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], waits)
    queue_empty = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], waits)
    staging = gl.allocate_shared_memory(y_desc.dtype, [2, 1, 1, _HALF_R, _BLOCK_N], y_desc.layout)
    for slot in gl.static_range(_STAGES):
        mbarrier.init(ring_full.index(slot), count=1)
        mbarrier.init(ring_empty.index(slot), count=2)
    for slot in gl.static_range(QUEUE):
        mbarrier.init(queue_full.index(slot), count=1)
        mbarrier.init(queue_empty.index(slot), count=3)

    ring = (x_ring, weight_ring, ring_full, ring_empty)
    queue = (fields, queue_full, queue_empty)
    # The tuples stand in the call: through a variable, constants would become values of the run.
    gl.warp_specialize(
        [
            (_multiply, (0, y_desc, bias_ptr, E, N, K, ring, queue, staging, K_INNERMOST, HAS_BIAS)),
            (_multiply, (1, y_desc, bias_ptr, E, N, K, ring, queue, staging, K_INNERMOST, HAS_BIAS)),
            (_load, (x_desc, weight_desc, E, K, ring, queue, SPLIT_DIM, K_INNERMOST)),
            (_schedule, (offs_ptr, R, E, N, queue)),
        ],
        [4, 1, 1],
        [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
    )


def grouped_linear_gluon(
    x: Tensor, weight: Tensor, offs: Tensor, y: Tensor, bias: Tensor | None = None, split_dim: int = 0
) -> None:
    """Store `x_e @ weight[e]^T + bias[e]` in y [R, N]; x [R, K], weight [E, N, K], offs [E] int32, bias [E, N].

    With split_dim, the weight lies in parts: [W, E, c, K] (1) or [W, E, N, c] (2).
    """
    parts = weight if split_dim else weight[None]
    (R, K), N, E = x.shape, y.shape[1], offs.shape[0]
    k_innermost = parts.stride(3) == 1
    stored = parts if k_innermost else parts.transpose(2, 3)
    size = _PIECE_N.value if split_dim == 1 else _BLOCK_N.value
    box = [size, _BLOCK_K.value] if k_innermost else [_BLOCK_K.value, size]
    bound = (triton.cdiv(R, _BLOCK_R.value) + E) * triton.cdiv(N, _BLOCK_N.value)
    programs = min(bound, torch.cuda.get_device_properties(x.device).multi_processor_count)
    with torch.cuda.device_of(x):
        _grouped_linear_gluon_kernel[(programs,)](
            describe_rows(x, _HALF_R.value, _BLOCK_K.value),
            describe(stored, list(stored.shape), list(stored.stride()), [1, 1, *box]),
            describe_rows(y, _HALF_R.value, _BLOCK_N.value),
            offs.contiguous(),
            y if bias is None else bias.contiguous(),
            R,
            E,
            N,
            K,
            SPLIT_DIM=split_dim,
            K_INNERMOST=k_innermost,
            HAS_BIAS=bias is not None,
            num_warps=4,
        )
