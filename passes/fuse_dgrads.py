"""Give input gradients to our grouped GEMM where each row picked its weight.

Before:  weight bf16[E, N, K] -> index(ids) -> bf16[S, N, K] -> permute -> bmm(., dy bf16[S, N, 1]) -> bf16[S, K, 1]
After:   weight bf16[E, N, K] -> permute -> gtp.grouped_linear(dy in the order of its experts, ., offs), put back

Forward would keep a matrix for each row until backward. The forward itself stays as the model wrote it.

1. For each gathered weight, the nodes `weight[ids]`.
2. Backward's batched GEMMs that read one, behind views: rewritten.
3. What else reads one in backward keeps it alive: a skip, with the reason.

Needs: anchors. Leaves: no matrix for each row between forward and backward, or a skip with the reason.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from gtp_compile.kernels.checks import FLOAT_DTYPES
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import Emit, GraphEmit
from gtp_compile.passes.picked_rows import pick_rows, put_rows_back, sort_by_expert, times_rows
from gtp_compile.passes.view_dims import Dims, dims_behind, dims_of, is_rearrangement

__all__ = ["fuse_dgrads"]

aten = torch.ops.aten
gtp = torch.ops.gtp


def fuse_dgrads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Let no input gradient read a weight for each row."""
    report = PassReport()
    for weight in gm.graph.find_nodes(op="call_function", target=gtp.materialize.default):
        for picked in [u for u in weight.users if _picks_whole_matrices(u, weight)]:
            for user, operand, dims in list(_readers_in_backward(picked)):
                report.matched += 1
                if dims is None or not _is_bmm_with(user, operand, dims):
                    report.skip(user, f"{user.name}: reads a weight for each row, which forward keeps until backward")
                    continue
                emit = GraphEmit(gm.graph, like=user)
                with emit.before(user):
                    result = _write(emit, user, operand, dims, weight, picked.args[1][0])  # type: ignore[index]
                user.replace_all_uses_with(result)
                gm.graph.erase_node(user)
                report.changed += 1
    return report


def _picks_whole_matrices(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a node is `weight[ids]`, one matrix of a stack for each id."""
    if node.target is not aten.index.Tensor or node.args[0] is not weight or weight.meta["val"].ndim != 3:
        return False
    indices: Any = node.args[1]
    if len(indices) != 1 or indices[0] is None:
        return False
    ids = indices[0].meta["val"]
    return ids.ndim == 1 and ids.dtype in (torch.int32, torch.int64)


def _readers_in_backward(picked: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, Dims | None]]:
    """Each node of backward that reads `picked` behind views, with what it reads of it, and its dims."""
    todo: list[tuple[fx.Node, Dims | None]] = [(picked, dims_of(picked.meta["val"].shape))]
    while todo:
        node, dims = todo.pop()
        for user in node.users:
            if is_rearrangement(user):
                todo.append((user, dims and dims_behind(dims, user)))
            elif user.meta.get("partitioner_tag") == "is_backward":
                yield user, node, dims


def _is_bmm_with(user: fx.Node, operand: fx.Node, dims: Dims) -> bool:
    """Whether `user` multiplies `operand`, a batch of the picked matrices, perhaps transposed, by something else.

    A batch of one, whose dim is None, too: ranks with more rows gather the weight again in backward, so all must.
    """
    return (
        user.target is aten.bmm.default
        and user.args[0] is not user.args[1]
        and operand.meta["val"].dtype in FLOAT_DTYPES
        and len(dims) == 3
        and (dims[0] is None or (dims[0].is_batch and not dims[0].part))
        and all(d is not None and not d.is_batch and not d.part for d in dims[1:])
    )


def _write(emit: Emit, bmm: fx.Node, operand: fx.Node, dims: Dims, weight: fx.Node, ids: fx.Node) -> fx.Node:
    is_left = bmm.args[0] is operand  # [S, M, C] @ [S, C, rows], or [S, rows, C] @ [S, C, M]
    other: Any = bmm.args[1 if is_left else 0]
    if is_left:
        other = emit(aten.permute.default, other, [0, 2, 1])
    order, offs = sort_by_expert(emit, ids, weight.meta["val"].shape[0])
    is_transposed = dims[1].axis == 2  # type: ignore[union-attr]
    if is_transposed == is_left:  # the kernel wants [E, M, C]
        weight = emit(aten.permute.default, weight, [0, 2, 1])
    rows = emit(gtp.grouped_linear.default, pick_rows(emit, other, order), weight, times_rows(emit, offs, other))
    result = put_rows_back(emit, rows, order, other)
    return emit(aten.permute.default, result, [0, 2, 1]) if is_left else result  # type: ignore[no-any-return]
