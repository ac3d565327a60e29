# R routed rows, E experts, N out features, K in features. Rows of one expert are adjacent; offs_E holds their ends.
#
#         x_RK               y_RN
#   0     +--------+         +------+    One program: one BLOCK_R x BLOCK_N tile of y, walking along K.
#         | e=0    | @ w0^T  | e=0  |
#   offs0 +--------+         +------+    A row tile never spans two experts, so each segment (an expert's rows, or the
#         | e=1    | @ w1^T  | e=1  |    tail, counted as expert E) starts a new tile and ends in a partial one. E + 1
#   offs1 +--------+         +------+    segments make at most cdiv(R, BLOCK_R) + E tiles: a bound that the host knows.
#         | tail   |         |  0   |    Which tile belongs to whom only the device knows; programs in excess return.
#   R     +--------+ unread  +------+

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtp_compile.kernels.grouped_linear.configs import grouped_linear_config

# Triton's interpreter multiplies the raw bits of bf16 operands; there the kernel widens them first.
_INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def _locate_tile(offs_ptr, row_tile, R, E, BLOCK_R: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the expert of a row tile (E for the tail, more for a tile in excess), its first row, its expert's end."""
    e_E = tl.arange(0, SEGMENTS)
    # Offsets are not checked on the host (that would synchronize); the bound keeps a wrong one inside the buffers.
    end_E = tl.minimum(tl.load(offs_ptr + e_E, mask=e_E < E, other=R), R)
    begin_E = tl.minimum(tl.load(offs_ptr + e_E - 1, mask=(e_E > 0) & (e_E <= E), other=R), R)
    begin_E = tl.where(e_E == 0, 0, begin_E)
    tiles_E = tl.cdiv(tl.maximum(end_E - begin_E, 0), BLOCK_R)
    expert = tl.sum((tl.cumsum(tiles_E, axis=0) <= row_tile).to(tl.int32), axis=0)
    first_tile = tl.sum(tl.where(e_E < expert, tiles_E, 0), axis=0)
    begin = tl.sum(tl.where(e_E == expert, begin_E, 0), axis=0)
    end = tl.sum(tl.where(e_E == expert, end_E, 0), axis=0)
    return expert, begin + (row_tile - first_tile) * BLOCK_R, end


@triton.jit(do_not_specialize=["R"])
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    offs_ptr,
    y_ptr,
    R,
    E,
    N,
    K,
    chunk,
    stride_x_R,
    stride_x_K,
    stride_weight_W,
    stride_weight_E,
    stride_weight_N,
    stride_weight_K,
    stride_bias_E,
    stride_bias_N,
    SPLIT_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    SEGMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tiles_R = tl.cdiv(R, BLOCK_R) + E
    tiles_N = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile_R, tile_N = tl.swizzle2d(pid // tiles_N, pid % tiles_N, tiles_R, tiles_N, BAND)
    expert, first_row, end = _locate_tile(offs_ptr, tile_R, R, E, BLOCK_R, SEGMENTS)
    if expert > E:
        return

    r_R = (first_row + tl.arange(0, BLOCK_R)).to(tl.int64)
    n_N = tile_N * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_R = r_R < end
    mask_N = n_N < N
    x_R = x_ptr + r_R * stride_x_R
    weight_N = weight_ptr + expert.to(tl.int64) * stride_weight_E
    if SPLIT_DIM == 1:
        weight_N += n_N // chunk * stride_weight_W + n_N % chunk * stride_weight_N
    else:
        weight_N += n_N * stride_weight_N

    y_RN = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    # The tail is an expert without weights: it skips the products and stores zeros.
    for start in range(0, tl.where(expert < E, K, 0), BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K).to(tl.int64)
        mask_K = k_K < K
        x_RK = tl.load(x_R[:, None] + (k_K * stride_x_K)[None, :], mask=mask_R[:, None] & mask_K[None, :], other=0.0)
        if SPLIT_DIM == 2:
            weight_K = k_K // chunk * stride_weight_W + k_K % chunk * stride_weight_K
        else:
            weight_K = k_K * stride_weight_K
        weight_KN = tl.load(weight_N[None, :] + weight_K[:, None], mask=mask_K[:, None] & mask_N[None, :], other=0.0)
        if INTERPRETED:
            x_RK = x_RK.to(tl.float32)
            weight_KN = weight_KN.to(tl.float32)
        y_RN = tl.dot(x_RK, weight_KN, acc=y_RN, input_precision="ieee")

    if HAS_BIAS:
        bias_N = bias_ptr + expert.to(tl.int64) * stride_bias_E + n_N * stride_bias_N
        y_RN += tl.load(bias_N, mask=mask_N & (expert < E), other=0.0).to(tl.float32)[None, :]
    y_ptrs_RN = y_ptr + (r_R * N)[:, None] + n_N[None, :]
    tl.store(y_ptrs_RN, y_RN.to(y_ptr.dtype.element_ty), mask=mask_R[:, None] & mask_N[None, :])


def grouped_linear_triton(
    x: Tensor, weight: Tensor, offs: Tensor, y: Tensor, bias: Tensor | None = None, split_dim: int = 0
) -> None:
    """Store `x_e @ weight[e]^T + bias[e]` in y [R, N]; x [R, K], weight [E, N, K], offs [E] int32, bias [E, N].

    With split_dim, the weight lies in parts: [W, E, c, K] (1) or [W, E, N, c] (2). The launch is the bound of row
    tiles times N tiles.
    """
    (R, K), N, E = x.shape, y.shape[1], offs.shape[0]
    parts = weight if split_dim else weight[None]
    config = grouped_linear_config(x.dtype)
    grid = ((triton.cdiv(R, config.block_r) + E) * triton.cdiv(N, config.block_n),)
    with torch.cuda.device_of(x):
        _grouped_linear_kernel[grid](
            x,
            parts,
            y if bias is None else bias,
            offs.contiguous(),
            y,
            R,
            E,
            N,
            K,
            parts.shape[split_dim + 1],
            *x.stride(),
            *parts.stride(),
            *((0, 0) if bias is None else bias.stride()),
            SPLIT_DIM=split_dim,
            HAS_BIAS=bias is not None,
            BLOCK_R=config.block_r,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            BAND=config.band,
            SEGMENTS=triton.next_power_of_2(E + 1),
            INTERPRETED=_INTERPRETED,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
