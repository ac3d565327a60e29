"""Finder: from the gradient that reaches an anchor back to what computed it. Pure; edits nothing.

    a GEMM                                        in one of the forms of `gemm_forms`
    sum(dy * x_hat)                               reduction (norms, biases)
    index_put(zeros, ids, dy, accumulate)         scatter (embeddings, per-expert biases)
      |
      |  views, casts, stacks, slices' backwards, sums of several uses, multiplications by a number
      v
    gtp::finalize

The nodes between form a `Chain`. What a chain can't be followed through is kept in it as `unknown`, with the reason:
there the gradient stays as rounded as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from gtp_compile.passes.base import Skip, operator_of
from gtp_compile.passes.gemm_forms import Gemm, find_gemm

__all__ = ["Chain", "Kind", "find_chain", "kind_of"]

aten = torch.ops.aten
prims = torch.ops.prims

Kind = Literal["view", "list", "paste", "add", "scale", "cast", "gemm", "reduce", "scatter", "factory"]

_KINDS: dict[Any, Kind] = {
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default,
            aten.transpose.int, aten.t.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
            aten.unsqueeze.default, aten.select.int, aten.slice.Tensor, aten.alias.default, aten.detach.default,
            aten.clone.default, aten.expand.default, aten.slice_backward.default, aten.select_backward.default,
            aten.constant_pad_nd.default,
        ),
        "view",
    ),
    **dict.fromkeys((aten.cat.default, aten.stack.default), "list"),
    # How Inductor writes select_backward and slice_backward: into zeros.
    **dict.fromkeys((aten.select_scatter.default, aten.slice_scatter.default), "paste"),
    **dict.fromkeys((aten.add.Tensor,), "add"),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default), "scale"),
    **dict.fromkeys((prims.convert_element_type.default, aten._to_copy.default), "cast"),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), "reduce"),
    **dict.fromkeys(
        (
            aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
            aten.index_add.default, aten.scatter_add.default, aten.embedding_dense_backward.default,
        ),
        "scatter",
    ),
    **dict.fromkeys(
        (aten.full.default, aten.zeros.default, aten.empty.memory_format, aten.new_zeros.default,
         aten.new_full.default, aten.new_empty.default, aten.zeros_like.default, aten.full_like.default),
        "factory",
    ),
}  # fmt: skip


@dataclass(slots=True)
class Chain:
    """The computation of one gradient, from operands to the anchor.

    Attributes:
        root: the node that reaches the anchor.
        nodes: every node whose dtype follows the gradient's, inputs before users; the last one is the root.
        operands: the nodes where the chain is cut; their own dtype is not the gradient's business.
        gemms: the nodes among `nodes` that are results of GEMMs, each with the GEMM.
        reductions: the others that compute, scatters too.
        rows: the operands that are a single row's gradient, of which nothing was summed (a bias).
        unknown: the operands at which a gradient arrives in a form that is not known, with the reason.
    """

    root: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    operands: list[fx.Node] = field(default_factory=list)
    gemms: dict[fx.Node, Gemm] = field(default_factory=dict)
    reductions: list[fx.Node] = field(default_factory=list)
    rows: list[fx.Node] = field(default_factory=list)
    unknown: dict[fx.Node, Skip] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why not all of the gradient was traced to a GEMM or a reduction ("" where it was)."""
        return "; ".join(dict.fromkeys(s.reason for s in self.unknown.values()))


def kind_of(node: fx.Node) -> Kind | None:
    """What role a node may play in a chain; None if none."""
    if node.op != "call_function":
        return None
    if find_gemm(node) is not None:
        return "gemm"
    kind = _KINDS.get(node.target)
    if kind == "scale" and any(isinstance(a, fx.Node) for a in node.args[1:]):
        return None
    if kind == "add" and (node.kwargs.get("alpha", 1) != 1 or not isinstance(node.args[1], fx.Node)):
        return None
    return kind


def find_chain(root: fx.Node, dtype: torch.dtype) -> Chain:
    """Follow a gradient back from the node that reaches its anchor, as long as it may be narrower than `dtype`."""
    chain = Chain(root)
    _Walk(chain, dtype).visit(root)
    return chain


_GEMMS = (aten.mm.default, aten.bmm.default, aten.baddbmm.default, aten.addmm.default, aten._grouped_mm.default)


def _scattered(node: fx.Node) -> list[Any]:
    """The base of a scatter, and what is put into it where that is weight gradients.

    Those are rows of a stack `[E, N, K]`, or the result of a GEMM that nobody else reads (`F.linear(x, w[ids])`).
    Otherwise gradients of activations are scattered (embeddings, per-expert biases).
    """
    if node.target is aten.embedding_dense_backward.default:
        base, put = [], node.args[0]
    else:
        is_put = node.target in (aten.index_put.default, aten._unsafe_index_put.default)
        base, put = [node.args[0]], node.args[2 if is_put else 3]
    source, alone = _source(put)
    weights = node.meta["val"].ndim > 2 or (alone and kind_of(source) == "gemm")
    return [*base, put] if weights else base


def _reduced(node: fx.Node) -> list[Any]:
    """What a sum adds up where that is weight gradients: matrices that a GEMM computed (a broadcast weight)."""
    source, _ = _source(node.args[0], ("view", "cast", "scale"))
    is_matrix = sum(size != 1 for size in node.meta["val"].shape) >= 2
    computes = source.target in _GEMMS or kind_of(source) == "gemm" or _is_scaled_gemm(source)
    return [node.args[0]] if is_matrix and computes else []


def _is_scaled_gemm(node: fx.Node) -> bool:
    """Whether a node is a GEMM's matrices, each times a number of a tensor (a broadcast weight that was scaled)."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor):
        return False
    factors = [a for a in node.args if isinstance(a, fx.Node)]
    is_scale = [a.meta["val"].ndim >= 2 and tuple(a.meta["val"].shape[-2:]) == (1, 1) for a in factors]
    return any(is_scale) and any(_source(a)[0].target in _GEMMS for a in factors)


def _source(node: Any, kinds: tuple[Kind, ...] = ("view", "cast")) -> tuple[fx.Node, bool]:
    """What computed a value, behind nodes of these kinds; and whether nobody else reads it on the way."""
    alone = len(node.users) == 1
    while kind_of(node) in kinds:
        node = node.args[0]
        alone = alone and len(node.users) == 1
    return node, alone


def _is_single_row(node: fx.Node) -> bool:
    """Whether a value is the gradient of an activation of one row: a wgrad GEMM reads it, too.

    Such a row is a bias's whole gradient on a rank where each expert has one (autograd drops the sum), and no more
    rounded than the same rows are where there are several.
    """
    if 1 not in node.meta["val"].shape:
        return False
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            gemm = find_gemm(user)
            if gemm is not None and any(_source(read)[0] is node for read in gemm.operands):
                return True
            # A GEMM over one row is written as casts and a product.
            if user not in seen and (kind_of(user) in ("view", "cast") or user.target is aten.mul.Tensor):
                seen.add(user)
                todo.append(user)
    return False


# Which arguments of a node the gradient runs through; those of the other kinds are operands.
_FOLLOW: dict[Kind, Callable[[fx.Node], list[Any]]] = {
    "view": lambda n: [n.args[0]],
    "list": lambda n: list(n.args[0]),  # type: ignore[arg-type]
    "paste": lambda n: list(n.args[:2]),
    "add": lambda n: list(n.args[:2]),
    "scale": lambda n: [n.args[0]],
    "cast": lambda n: [n.args[0]],
    "gemm": lambda n: [],
    "reduce": _reduced,
    "scatter": _scattered,
    "factory": lambda n: [],
}


class _Walk:
    """One depth-first walk that fills a chain."""

    def __init__(self, chain: Chain, dtype: torch.dtype) -> None:
        self.chain = chain
        self.dtype = dtype
        self.seen: set[fx.Node] = set()

    def visit(self, root: fx.Node) -> None:
        todo = [(root, False)]  # by hand, since a sum of many uses is a deep chain; True: its inputs are done
        while todo:
            node, done = todo.pop()
            if done:
                self._add(node)
            elif node not in self.seen:
                self.seen.add(node)
                kind = kind_of(node)
                if kind is None:
                    self._cut(node)
                else:
                    todo.append((node, True))
                    todo += [(a, False) for a in reversed(_FOLLOW[kind](node))]

    def _cut(self, node: fx.Node) -> None:
        self.chain.operands.append(node)
        # What is as wide as the sum will be has lost nothing, whatever computed it.
        if node.meta["val"].dtype.itemsize >= self.dtype.itemsize:
            return
        if _is_single_row(node):
            self.chain.rows.append(node)
        else:
            self.chain.unknown[node] = Skip(node.name, _why_unknown(node))

    def _add(self, node: fx.Node) -> None:
        kind = kind_of(node)
        assert kind is not None
        follow = _FOLLOW[kind](node)
        gemm = find_gemm(node) if kind == "gemm" else None
        read = gemm.operands if gemm is not None else node.all_input_nodes
        self.chain.operands += [a for a in dict.fromkeys(read) if a not in follow and a not in self.chain.operands]
        self.chain.nodes.append(node)
        if gemm is not None:
            self.chain.gemms[node] = gemm
        elif kind in ("reduce", "scatter"):
            self.chain.reductions.append(node)


def _why_unknown(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"the gradient comes from outside this graph ({node.name}); its GEMM is in another graph"
    if node.target is aten._grouped_mm.default:
        return f"{node.name}: this grouped_mm is no weight gradient (ragged rows are not contracted)"
    why = f"{node.name}: no pass knows a weight gradient through {operator_of(node)}"
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and len(node.all_input_nodes) == 2:
        why += " (the weight is scaled by a tensor; scale the activations instead)"
    return why
