# R routed rows, E experts, N out features, K in features. Rows of one expert are adjacent; offs_E holds their ends.
#
#         dy_RN            x_RK                dw_ENK
#   0     +------+         +--------+          +--------+
#         | e=0  |         |  e=0   |          | e=0    |  dw[e] = dy[begin:end]^T @ x[begin:end]
#   offs0 +------+         +--------+          +--------+
#         | e=1  |         |  e=1   |          | e=1    |  one program: one BLOCK_N x BLOCK_K tile of one expert,
#   offs1 +------+         +--------+          +--------+  walking down that expert's rows BLOCK_R at a time
#         | tail |         |  tail  |
#   R     +------+ unread  +--------+ unread

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtp_compile.kernels.grouped_wgrad.configs import grouped_wgrad_config

# Triton's interpreter multiplies the raw bits of bf16 operands; there the kernel widens them first.
_INTERPRETED = triton.knobs.runtime.interpret

_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["R"])
def _grouped_wgrad_kernel(
    dy_ptr,
    x_ptr,
    offs_ptr,
    dw_ptr,
    R,
    N,
    K,
    stride_dy_R,
    stride_dy_N,
    stride_x_R,
    stride_x_K,
    stride_dw_E,
    stride_dw_N,
    stride_dw_K,
    parts,
    chunk,
    stride_dw_W,
    ACCUMULATE: tl.constexpr,
    SPLIT_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TABLE_OF: tl.constexpr,
):
    # The parts' common size is the size rounded up, so what is stored may be larger than what is computed.
    stored_N = parts * chunk if SPLIT_DIM == 1 else N
    stored_K = parts * chunk if SPLIT_DIM == 2 else K
    tiles_N = tl.cdiv(stored_N, BLOCK_N)
    tiles_K = tl.cdiv(stored_K, BLOCK_K)
    expert = tl.program_id(0) // (tiles_N * tiles_K)
    tile = tl.program_id(0) % (tiles_N * tiles_K)
    tile_N, tile_K = tl.swizzle2d(tile // tiles_K, tile % tiles_K, tiles_N, tiles_K, BAND)

    # Offsets are not checked on the host (that would synchronize); the bounds keep a wrong one inside the buffers.
    begin = tl.maximum(tl.load(offs_ptr + expert - 1, mask=expert > 0, other=0), 0)
    end = tl.minimum(tl.load(offs_ptr + expert), R)

    n_N = tile_N * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    k_K = tile_K * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
    mask_N = n_N < N
    mask_K = k_K < K
    dy_N = dy_ptr + n_N * stride_dy_N
    x_K = x_ptr + k_K * stride_x_K

    dw_NK = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(begin, end, BLOCK_R):
        r_R = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask_R = r_R < end
        # Both operands are masked by row: 0 * NaN from a neighbour's row would be NaN.
        dy_RN = tl.load(dy_N[None, :] + (r_R * stride_dy_R)[:, None], mask=mask_R[:, None] & mask_N[None, :], other=0.0)
        x_RK = tl.load(x_K[None, :] + (r_R * stride_x_R)[:, None], mask=mask_R[:, None] & mask_K[None, :], other=0.0)
        if INTERPRETED:
            dy_RN = dy_RN.to(tl.float32)
            x_RK = x_RK.to(tl.float32)
        dw_NK = tl.dot(tl.trans(dy_RN), x_RK, acc=dw_NK, input_precision="ieee")

    # Behind the end of a split dimension lie zeros, even where zero times NaN was summed.
    dw_NK = tl.where(mask_N[:, None] & mask_K[None, :], dw_NK, 0.0) if SPLIT_DIM else dw_NK
    mask_NK = (n_N < stored_N)[:, None] & (k_K < stored_K)[None, :]
    if TABLE_OF is None:
        dw = dw_ptr + expert.to(tl.int64) * stride_dw_E
    else:  # one output per expert, of which dw_ptr holds the addresses; 0 where nobody wants that expert's
        address = tl.load(dw_ptr + expert)
        mask_NK &= address != 0
        dw = address.to(tl.pointer_type(TABLE_OF))
    if SPLIT_DIM == 1:
        n_N = n_N // chunk * stride_dw_W + n_N % chunk * stride_dw_N
    else:
        n_N = n_N * stride_dw_N
    if SPLIT_DIM == 2:
        k_K = k_K // chunk * stride_dw_W + k_K % chunk * stride_dw_K
    else:
        k_K = k_K * stride_dw_K
    dw_ptrs_NK = dw + n_N[:, None] + k_K[None, :]
    if ACCUMULATE:
        # Without rows nothing is stored, not even the sum of an old -0.0 and 0.0.
        mask_NK &= begin < end
        dw_NK += tl.load(dw_ptrs_NK, mask=mask_NK, other=0.0)
    tl.store(dw_ptrs_NK, dw_NK.to(dw.dtype.element_ty), mask=mask_NK)


def grouped_wgrad_triton(
    dy: Tensor, x: Tensor, offs: Tensor, dw: Tensor, *, accumulate: bool, split_dim: int = 0
) -> None:
    """Launch one program per tile of dw [E, N, K] (its parts with split_dim); dy [R, N], x [R, K], offs [E] int32."""
    _launch(dy, x, offs, dw, dw.stride()[-3:], None, accumulate, split_dim)


def grouped_wgrad_into_triton(dy: Tensor, x: Tensor, offs: Tensor, outs: Sequence[Tensor | None]) -> None:
    """Store in one `[N, K]` per expert; an expert whose output is None is computed and dropped."""
    given = [out for out in outs if out is not None and out.numel()]
    if not given:
        return
    (dtype, *others), contiguous = {out.dtype for out in given}, all(out.is_contiguous() for out in given)
    N, K = dy.shape[1], x.shape[1]
    if others or not contiguous:  # no GEMM writes these; the copy is the price
        whole = torch.empty((len(outs), N, K), dtype=torch.float32, device=dy.device)
        grouped_wgrad_triton(dy, x, offs, whole, accumulate=False)
        for out, part in zip(outs, whole, strict=True):
            if out is not None:
                out.copy_(part)
        return
    addresses = [0 if out is None else out.data_ptr() for out in outs]
    table = torch.tensor(addresses, dtype=torch.int64, device=dy.device)
    _launch(dy, x, offs, table, (0, K, 1), _TL_DTYPES[dtype], False)


def _launch(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    dw: Tensor,
    stride_dw: tuple[int, ...],
    table_of: tl.dtype | None,
    accumulate: bool,
    split_dim: int = 0,
) -> None:
    (R, N), K, E = dy.shape, x.shape[1], offs.shape[0]
    parts, chunk, stride_part = (dw.shape[0], dw.shape[split_dim + 1], dw.stride(0)) if split_dim else (1, 1, 0)
    stored_N, stored_K = (parts * chunk if split_dim == dim else size for dim, size in ((1, N), (2, K)))
    config = grouped_wgrad_config(dy.dtype)
    grid = (E * triton.cdiv(stored_N, config.block_n) * triton.cdiv(stored_K, config.block_k),)
    with torch.cuda.device_of(dw):
        _grouped_wgrad_kernel[grid](
            dy,
            x,
            offs.contiguous(),
            dw,
            R,
            N,
            K,
            *dy.stride(),
            *x.stride(),
            *stride_dw,
            parts,
            chunk,
            stride_part,
            ACCUMULATE=accumulate,
            SPLIT_DIM=split_dim,
            BLOCK_R=config.block_r,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            BAND=config.band,
            INTERPRETED=_INTERPRETED,
            TABLE_OF=table_of,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
