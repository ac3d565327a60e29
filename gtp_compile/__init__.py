"""Generalized tensor parallelism in the compiler: a `torch.compile` backend named "gtp".

Names are loaded on first use. `TORCH_LOGS="+gtp_compile.passes"` makes torch import this package while torch itself is
half imported, so nothing here may import torch at the top level; it also keeps `import gtp_compile` cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtp_compile.backend import gtp
    from gtp_compile.expert_lists import is_expert_list
    from gtp_compile.explaining import explain
    from gtp_compile.grouped_linear import GroupedLinear, Linear
    from gtp_compile.optim import MainGradOptimizer
    from gtp_compile.sharding import shard, shard_experts, shard_large
    from gtp_compile.unsharding import unsharded
    from gtp_compile.verifying import verify
    from gtp_compile.weights import (
        DistributedWeight,
        finalize_weight_grads,
        is_distributed_weight,
        materialize_weight_for_backward,
        materialize_weight_for_forward,
        weight_grad_buffers,
        weight_grad_dtype,
    )

__all__ = [
    "DistributedWeight",
    "GroupedLinear",
    "Linear",
    "MainGradOptimizer",
    "explain",
    "finalize_weight_grads",
    "gtp",
    "is_distributed_weight",
    "is_expert_list",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
    "shard",
    "shard_experts",
    "shard_large",
    "unsharded",
    "verify",
    "weight_grad_buffers",
    "weight_grad_dtype",
]

_HOME = {
    "DistributedWeight": "weights",
    "GroupedLinear": "grouped_linear",
    "Linear": "grouped_linear",
    "MainGradOptimizer": "optim",
    "explain": "explaining",
    "finalize_weight_grads": "weights",
    "gtp": "backend",
    "is_distributed_weight": "weights",
    "is_expert_list": "expert_lists",
    "materialize_weight_for_backward": "weights",
    "materialize_weight_for_forward": "weights",
    "shard": "sharding",
    "shard_experts": "sharding",
    "shard_large": "sharding",
    "unsharded": "unsharding",
    "verify": "verifying",
    "weight_grad_buffers": "weights",
    "weight_grad_dtype": "weights",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
