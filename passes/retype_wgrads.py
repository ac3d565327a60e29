"""Give each weight gradient its group's dtype from where it is computed: out of the GEMM's accumulators.

Before (main_grad float32, compute bfloat16):

    dy bf16[R, N], x bf16[R, K] -> mm -> bf16[N, K] -> view -> finalize(grad_dtype=f32)

After:

    dy bf16[R, N], x bf16[R, K] -> gtp.dense_wgrad -> f32[N, K] -> view -> finalize(grad_dtype=f32)

1. For each gradient anchor, follow the gradient back (`wgrad_patterns.find_chain`).
2. Rebuild the chain in the anchor's dtype, each new node right behind the old one: GEMMs write it, allocations and
   sums on the way follow, casts vanish.
3. Where the chain can't be followed, `gtp::widen` casts what arrives and says so at run time, with the weight's name.
4. Other users of a retyped GEMM (plain followers in the group) get a cast of its result: there is one GEMM, not two.

Needs: group_wgrads. Leaves: every anchor's gradient in its `grad_dtype`.
"""

from typing import Any

import torch
from torch import fx

from gtp_compile.passes.anchors import Finalize
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.emit import insert_call
from gtp_compile.passes.gemm_forms import write_gemm
from gtp_compile.passes.wgrad_patterns import Chain, find_chain, kind_of

__all__ = ["retype_wgrads"]

aten = torch.ops.aten
prims = torch.ops.prims


def retype_wgrads(gm: fx.GraphModule, ctx: PassContext) -> PassReport:
    """Make every gradient arrive at its anchor in the dtype in which it is summed over ranks."""
    report = PassReport()
    for anchor in Finalize.find(gm.graph):
        report.matched += 1
        chain = find_chain(anchor.grad, anchor.grad_dtype)
        if _is_typed(chain, anchor.grad_dtype):
            continue
        report.skipped += chain.unknown.values()
        anchor.node.update_arg(0, _Retype(gm.graph, chain, anchor).run())
        report.changed += 1
    return report


def _is_typed(chain: Chain, dtype: torch.dtype) -> bool:
    """Whether the gradient arrives in `dtype` and loses nothing before (a bf16 GEMM and a cast to f32 won't do)."""
    return chain.root.meta["val"].dtype == dtype and not _is_rounded(chain, dtype)


def _is_rounded(chain: Chain, dtype: torch.dtype) -> bool:
    return bool(chain.unknown) or any(torch.promote_types(d, dtype) != d for d in map(_dtype, chain.nodes))


def _dtype(node: fx.Node) -> torch.dtype:
    return node.meta["val"].dtype


class _Retype:
    """Rebuild one chain in another dtype."""

    def __init__(self, graph: fx.Graph, chain: Chain, anchor: Finalize) -> None:
        self.graph = graph
        self.chain = chain
        self.anchor = anchor
        self.dtype = anchor.grad_dtype
        self.new: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.Node:
        root = self.chain.root
        if not _is_rounded(self.chain, self.dtype):
            # Wider than the rule asks for: nothing is made narrower before the anchor.
            return self._cast(root, self.anchor.node)
        for node in self.chain.unknown:
            self.new[node] = self._behind(node, torch.ops.gtp.widen.default, node, self.anchor.shards[0], self.dtype)
        for node in self.chain.rows:
            self.new[node] = self._behind(node, prims.convert_element_type.default, node, self.dtype)
        for node in self.chain.nodes:
            self.new[node] = self._rebuilt(node)
        self._redirect_others()
        return self.new[root] if root in self.new else self._cast(root, self.anchor.node)

    def _rebuilt(self, node: fx.Node) -> fx.Node:
        kind = kind_of(node)
        if kind == "cast":
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            return self.new[source] if source in self.new else self._cast(source, node)
        if _dtype(node) == self.dtype and all(self.new.get(a, a) is a for a in node.all_input_nodes):
            return node  # typed for another anchor that it reaches, too
        with self.graph.inserting_before(node.next):
            if kind == "gemm":
                return write_gemm(self.graph, self.chain.gemms[node], self.dtype)
            kwargs = dict(node.kwargs)
            if kind in ("reduce", "factory"):
                kwargs["dtype"] = self.dtype
            return insert_call(self.graph, node.target, tuple(self._arg(node, a) for a in node.args), kwargs, like=node)

    def _arg(self, node: fx.Node, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [self._arg(node, a) for a in arg]
        if not isinstance(arg, fx.Node):
            return arg
        if arg in self.new:
            return self.new[arg]
        # Values scattered into a typed base must have its dtype; a reduction casts what it reads by itself.
        if kind_of(node) == "scatter" and arg.meta["val"].is_floating_point():
            return self._cast(arg, node)
        return arg

    def _cast(self, x: fx.Node, before: fx.Node) -> fx.Node:
        if x.meta["val"].dtype == self.dtype:
            return x
        with self.graph.inserting_before(before):
            return insert_call(self.graph, prims.convert_element_type.default, (x, self.dtype), like=before)

    def _behind(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Insert a call right behind a node."""
        behind = node.next
        while behind.op == "placeholder":
            behind = behind.next
        with self.graph.inserting_before(behind):
            return insert_call(self.graph, target, args, like=self.anchor.node)

    def _redirect_others(self) -> None:
        """Let users outside the chain read a cast of the new results, so that the old GEMMs die."""
        computed: set[fx.Node] = set()
        inside = {*self.chain.nodes, self.anchor.node}
        for node in self.chain.nodes:
            if node not in self.chain.gemms and not any(a in computed for a in node.all_input_nodes):
                continue
            computed.add(node)
            others = [u for u in node.users if u not in inside]
            new = self.new[node]
            if not others or new is node:
                continue
            with self.graph.inserting_before(new.next):
                old_dtype = _dtype(node)
                narrow = new
                if _dtype(new) != old_dtype:
                    narrow = insert_call(self.graph, prims.convert_element_type.default, (new, old_dtype), like=node)
            for user in others:
                user.replace_input_with(node, narrow)
