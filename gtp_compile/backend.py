"""The backend: what `torch.compile(model, backend="gtp")` calls, once per graph that Dynamo captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

import gtp_compile.hooked_ops  # noqa: F401  (registers the ops)
from gtp_compile._compat import (
    compile_fx,
    compile_fx_inner,
    compile_name,
    empty_parts_kept,
    is_asked_for,
    make_boxed_func,
    uncached,
    will_accumulate,
)
from gtp_compile.bare_reads import input_name, real_inputs, refuse_bare_reads
from gtp_compile.config import GtpOptions, parse_options
from gtp_compile.eager_forward import expect_all_ranks, scopes_of
from gtp_compile.expert_graph import ExpertGraph
from gtp_compile.graph_breaks import report_breaks
from gtp_compile.parameters import ComputeLeaf, prepare_accumulation
from gtp_compile.partition import GtpPartitioner, lower_inference
from gtp_compile.plain_main_grads import Tap, finish, main_grads_of, prepare, tap_main_grads
from gtp_compile.session import CapturedGraph, current_session

__all__ = ["gtp"]

Compiled = Callable[..., Any]

_ANCHOR = torch.ops.gtp.materialize.default
_HOOKED = torch.ops.gtp.hooked_linear.default


def gtp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph: `torch.compile(model, backend="gtp", options={...})`.

    Args:
        gm, example_inputs: as Dynamo hands them over.
        mode: one of torch.compile's modes (`options={"mode": ...}` works, too).
        options: see `gtp_compile.config.GtpOptions`; Inductor's options are handed on.

    Raises:
        ValueError: an unknown option or mode.
        RuntimeError: `strict`, and a graph break inside an expert block or a weight gradient of no known form.
    """
    opts, patches = parse_options(mode, options)
    inner = _InnerCompile(opts, compile_name())
    refuse_bare_reads(gm, example_inputs)
    experts = ExpertGraph.of(gm, example_inputs)
    if experts is not None and experts.never_captured:
        return experts
    taps: list[Tap] = []
    if opts.accumulate_into_main_grad:
        gm, example_inputs, taps = tap_main_grads(gm, example_inputs)
    if not _has_call(gm, _ANCHOR, _HOOKED):
        # Not one of our patches: the graph shares its cache entry with backend="inductor".
        if opts.inner == "inductor":
            return cast(Compiled, compile_fx(gm, example_inputs, config_patches=patches or None))
        with uncached():
            return cast(Compiled, compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches or None))
    report_breaks(gm, example_inputs, opts.strict)
    patches["custom_partitioner_fn"] = GtpPartitioner(opts, inner.graph_name, _names(gm, example_inputs))
    session = current_session()
    known = len(session.graphs) if session is not None else 0
    # What somebody watches, or dumps, must be compiled; and an interpreter can't be saved.
    afresh = opts.inner == "eager" or opts.debug_dir is not None or session is not None
    if afresh:
        patches["fx_graph_cache"] = False
    with uncached() if afresh else contextlib.nullcontext(), empty_parts_kept():
        compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)
    captured = session.graphs[known:] if session is not None else []
    return _with_bookkeeping(compiled, captured, taps, experts)


def _names(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[str]:
    """The inputs' names: qualified ones for placed weights."""
    inputs = real_inputs(gm, example_inputs)
    return [x.fqn if isinstance(x, ComputeLeaf) else input_name(node) for node, x in inputs.items()]


def _has_call(gm: fx.GraphModule, *targets: Any) -> bool:
    """Whether one of our ops is called in the graph, or in a body inside it (a checkpointed block)."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(node.target in targets for graph in graphs for node in graph.nodes)


class _InnerCompile:
    """What `compile_fx` calls for each partitioned graph: Inductor, or nothing but our lowering."""

    def __init__(self, options: GtpOptions, graph_name: str) -> None:
        self.options = options
        self.graph_name = graph_name

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        if _has_call(gm, _ANCHOR):
            lower_inference(gm, self.options, self.graph_name)
        session = current_session()
        if session is not None and session.dry:
            from gtp_compile.dry_run import DryRun

            return make_boxed_func(DryRun(gm).run)
        if self.options.inner == "eager":
            return make_boxed_func(gm.forward)
        return compile_fx_inner(gm, example_inputs, **kwargs)


def _with_bookkeeping(
    compiled: Callable[..., Any], captured: list[CapturedGraph], taps: Sequence[Tap], experts: ExpertGraph | None
) -> Callable[..., Any]:
    """`compiled`, with main_grad made ready before each backward adds to it.

    Works on the arguments of the call: equal layers share this function, so it may not know one of them.
    """

    session = current_session()
    theirs = session.names if session is not None else {}

    def run(*args: Any) -> Any:
        leaves = [a for a in args if isinstance(a, ComputeLeaf)]
        if experts is not None and not experts.runs_captured(leaves):
            return experts(*args)
        scopes = scopes_of(leaves)
        if experts is None:
            for scope in scopes:
                scope.settle()
        for leaf in leaves:
            leaf.check_use()
            leaf.compiled_uses += 1
        if leaves:
            leaves[0].meet()
        if experts is not None:
            expect_all_ranks(leaves)
        for graph in captured:
            graph.calls.append(tuple(a.fqn if isinstance(a, ComputeLeaf) else theirs.get(id(a), "") for a in args))
            graph.inputs = args if graph.joint is not None else ()
        before = [_node(a) for a in args]
        out = compiled(*args, *main_grads_of(args, taps))
        trained = [leaf for leaf in leaves if leaf.requires_grad and leaf.main_grad is not None]
        plain = [args[tap.index] for tap in taps]
        if (trained or plain) and torch.is_grad_enabled():
            written = [a for a, node in zip(args, before, strict=True) if _node(a) is not node]
            _around_backward([*out, *written], before, trained, plain)
        for scope in scopes:
            scope.computed(out)
        return out

    return run


def _node(x: Any) -> Any:
    return x.grad_fn if isinstance(x, torch.Tensor) else None


def _around_backward(
    outputs: Sequence[Any], inputs: Sequence[Any], leaves: list[ComputeLeaf], plain: list[Any]
) -> None:
    """Have main_grads prepared when backward reaches the compiled graph, not when forward left it.

    `zero_grad` may come between the two. A backward that is not asked for a weight's gradient (`autograd.grad` of the
    input alone) runs the whole compiled graph all the same; such a main_grad is put back behind it.
    """
    spared: list[tuple[torch.Tensor, torch.Tensor]] = []
    added: list[Any] = []

    def make_ready(grads: Any) -> None:
        for leaf in leaves:
            if will_accumulate(leaf):
                prepare_accumulation(leaf)
            elif leaf.main_grad is not None:
                spared.append((leaf.main_grad, leaf.main_grad.clone()))
        for weight in plain:
            if is_asked_for(weight):
                prepare(weight)
                added.append(weight)
            else:
                spared.append((weight.main_grad, weight.main_grad.clone()))

    def put_back(grad_inputs: Any, grad_outputs: Any) -> None:
        while spared:
            main_grad, contents = spared.pop()
            main_grad.copy_(contents)
        while added:
            finish(added.pop())

    node = _compiled_node(outputs, inputs)
    if node is not None:
        node.register_prehook(make_ready)
        node.register_hook(put_back)


def _compiled_node(outputs: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """The autograd node of the compiled graph that made `outputs` (an output may be a view on top of it).

    Not one of the nodes behind the graph's `inputs`: an output may be a view of an input, which another graph made.
    """
    todo = [node for t in outputs if (node := _node(t)) is not None]
    seen = set(inputs)
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in node.name():
            return node
        todo += [n for n, _ in node.next_functions if n is not None]
    return None
