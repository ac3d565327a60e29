"""Every private torch import of the package, in one file: what differs between torch 2.11 and 2.14 is settled here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass
from torch._dynamo import mark_static
from torch._dynamo.eval_frame import skip_code
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import CompileContext
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "CUDAGRAPH_UNSAFE",
    "CustomPartitionerFn",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "compile_fx",
    "compile_fx_inner",
    "compile_name",
    "current_backward",
    "default_store",
    "empty_parts_kept",
    "fake_store",
    "fresh_compilation",
    "hidden_from_modes",
    "is_asked_for",
    "is_fake",
    "is_first_rank",
    "is_inductor_option",
    "list_mode_options",
    "make_boxed_func",
    "mark_static",
    "min_cut_rematerialization_partition",
    "named_group",
    "skip_frame",
    "take_for_foreach",
    "trace_artifact",
    "uncached",
    "will_accumulate",
    "wrap_init",
]

# Of an op that a CUDA graph must not capture.
CUDAGRAPH_UNSAFE = (torch.Tag.cudagraph_unsafe,)


def is_inductor_option(name: str) -> bool:
    """Whether `name` is a key of `torch._inductor.config`."""
    return name in inductor_config.get_config_copy()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Neither look up nor save compiled graphs while this is active (forward and, later, its backward)."""
    with functorch_config.patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def empty_parts_kept() -> Iterator[None]:
    """Trace `cat` as it is: Inductor's decomposition drops parts that are known to have no rows.

    With them go the GEMM of an expert that got no tokens on this rank, and its weight's gather, which the other ranks
    wait for. Torch's table is changed meanwhile: one of our own would keep compiled graphs from being found again.
    """
    table = select_decomp_table()
    cat = table.pop(torch.ops.aten.cat.default)
    try:
        yield
    finally:
        table[torch.ops.aten.cat.default] = cat


@contextlib.contextmanager
def fresh_compilation() -> Iterator[None]:
    """Let Dynamo compile as often as asked while this is active.

    Each watched compilation adds an entry to the code it traces; past its limit Dynamo would run that code in eager.
    """
    with dynamo_config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20):
        yield


@contextlib.contextmanager
def hidden_from_modes() -> Iterator[None]:
    """Run operators past whatever dispatch mode is active."""
    with _disable_current_modes():
        yield


def compile_name() -> str:
    """A name for the graph that is being compiled, after torch's own numbering ("0/1" in its logs)."""
    compile_id = CompileContext.current_compile_id()
    return "graph" if compile_id is None else f"graph_{compile_id}".replace("/", "_")


def is_first_rank() -> bool:
    """Whether this process writes files for all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def will_accumulate(leaf: torch.Tensor) -> bool:
    """Inside a backward: whether it is going to deliver a gradient to `leaf`."""
    return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))  # type: ignore[attr-defined]


def is_asked_for(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs, if one does, has any use for a gradient of `leaf`."""
    try:
        return will_accumulate(leaf)
    except RuntimeError:  # no backward runs (a test calls the op), or autograd.grad captures this very leaf
        return True


def current_backward() -> int:
    """A number for the backward that runs in this thread."""
    return int(torch._C._current_graph_task_id())


def default_store() -> Any:
    """The key-value store that the job's ranks share."""
    return dist.distributed_c10d._get_default_store()


def named_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, as functional collectives find it."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name)


def is_fake(group: dist.ProcessGroup) -> bool:
    """Whether a group's collectives do nothing."""
    return bool(dist.get_backend(group) == "fake")


def fake_store() -> Any:
    """The store of a process group whose collectives do nothing; importing it registers the "fake" backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def take_for_foreach(cls: Any) -> None:
    """Let stock optimizers choose their multi-tensor kernels for parameters of this class, as for a DTensor's."""
    _foreach_supported_types.append(cls)


def skip_frame(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from compiling a function's own frame; it still traces through it, and compiles what it calls.

    Such a function may ask `is_compiling` and mean "in a graph of my caller's".
    """
    skip_code(fn.__code__)
    return fn


def trace_artifact(name: str, text: str) -> None:
    """Add a text to the TORCH_TRACE log (read by tlparse), under the compilation that is running."""
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)


def wrap_init(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of `torch.nn.init`."""
    setattr(torch.nn.init, name, wrap(getattr(torch.nn.init, name)))
