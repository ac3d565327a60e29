"""`shard`: what it places where, what it refuses, and what a sharded model still is."""

import functools
from typing import Any

import pytest
import torch
from dist_helpers import BF16, FP32
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.testing import fake_mesh


@pytest.fixture
def mesh():
    with fake_mesh(4) as mesh:
        yield mesh


class Experts(nn.Module):
    """Stacked as [E, N, K], or as Hugging Face's transposed ones as [E, K, N]."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 8, 12))
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        if is_transposed:
            self.is_transposed = True


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.large = nn.Linear(1024, 1024)
        self.embedding = nn.Embedding(1 << 17, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.stacked = Experts()
        self.transposed = Experts(is_transposed=True)
        self.discrete = GroupedLinear(2, 8, 12)
        self.grouped = GroupedLinear(2, 8, 12, bias=False, single_grouped_weight=True)


DEFAULTS = {
    "dense.weight": Replicate(),
    "dense.bias": Replicate(),
    "large.weight": Shard(0),
    "large.bias": Replicate(),
    "embedding.weight": Shard(0),
    "conv.weight": Replicate(),
    "conv.bias": Replicate(),
    "norm.weight": Replicate(),
    "norm.bias": Replicate(),
    "stacked.weight": Shard(1),
    "stacked.counts": None,
    "transposed.weight": Shard(2),
    "transposed.counts": None,
    "discrete.weight0": Shard(0),
    "discrete.weight1": Shard(0),
    "discrete.bias0": Replicate(),
    "discrete.bias1": Replicate(),
    "grouped.weight": Shard(1),
}


def test_default_placements(mesh):
    model = Zoo()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert gtp_compile.shard(model, mesh) is model
    placed = {n: p.placements[0] if isinstance(p, DTensor) else None for n, p in model.named_parameters()}
    assert placed == DEFAULTS
    for name, param in model.named_parameters():
        assert param.shape == shapes[name]
        if placed[name] is None:
            assert type(param) is nn.Parameter
            continue
        local = list(shapes[name])
        if isinstance(placed[name], Shard):
            local[placed[name].dim] //= 4
        assert list(param.leaf.shape) == list(param.main_grad.shape) == local
        assert param.leaf.is_contiguous() and param.main_grad.dtype == FP32
        assert param.grad is None and param.leaf.fqn == name


@pytest.mark.parametrize(
    ("shard_fn", "dense"),
    [(gtp_compile.shard_experts, Replicate()), (functools.partial(gtp_compile.shard_large, min_numel=64), Shard(0))],
    ids=["experts", "all"],
)
def test_what_counts_as_large_is_the_users_choice(shard_fn, dense, mesh):
    model = gtp_compile.shard(Zoo(), mesh, shard_fn=shard_fn)
    placed = {n: p.placements[0] if isinstance(p, DTensor) else None for n, p in model.named_parameters()}
    matrices = {"dense.weight", "large.weight", "embedding.weight", "conv.weight"}
    assert placed == {n: dense if n in matrices else p for n, p in DEFAULTS.items()}


def test_a_compute_dtype_per_parameter(mesh):
    def keep_norms(fqn: str, module: nn.Module, param: nn.Parameter) -> torch.dtype | None:
        return None if isinstance(module, nn.LayerNorm) else BF16

    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, dtype=torch.float64))
    gtp_compile.shard(model, mesh, param_dtype=keep_norms, src_data_rank=None)
    assert {n: p.leaf.param_dtype for n, p in model.named_parameters()} == {
        "0.weight": BF16, "0.bias": BF16, "1.weight": torch.float64, "1.bias": torch.float64
    }  # fmt: skip
    assert model[0](torch.randn(3, 8, dtype=BF16)).dtype == BF16
    assert model[1](torch.randn(3, 8, dtype=torch.float64)).dtype == torch.float64


def test_negative_dims(mesh):
    model = gtp_compile.shard(nn.Linear(8, 4), mesh, shard_fn=lambda f, m, p: Shard(-1))
    assert model.weight.placements == (Shard(1),) and model.bias.placements == (Shard(0),)


def shard_all(fqn: str, module: nn.Module, param: nn.Parameter) -> Shard:
    return Shard(0)


def overlapping() -> nn.Module:
    """Three slices of one buffer, of which the last two overlap."""
    base = torch.zeros(64)
    model = nn.Module()
    for name, part in {"a": base[:16], "b": base[16:48], "c": base[40:64]}.items():
        model.register_parameter(name, nn.Parameter(part))
    return model


REFUSALS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no_mesh": (
        lambda mesh: nn.Linear(8, 8),
        {"mesh": None},
        TypeError,
        "mesh: a DeviceMesh is expected, got NoneType; see init_device_mesh",
    ),
    "too_few_placements": (
        lambda mesh: nn.Linear(8, 8),
        {"mesh": (2, 2), "shard_fn": lambda f, m, p: [Shard(0)]},
        ValueError,
        "weight: one placement per mesh dim is expected (2), shard_fn gave 1",
    ),
    "sharded_over_two_mesh_dims": (
        lambda mesh: nn.Linear(8, 8),
        {"mesh": (2, 2), "shard_fn": lambda f, m, p: (Shard(0), Shard(0))},
        ValueError,
        "weight: can be sharded over one mesh dim only, shard_fn gave (Shard(dim=0), Shard(dim=0)); flatten the two "
        "dims",
    ),
    "reduce_op": (
        lambda mesh: nn.Linear(8, 8),
        {"reduce_op": "max"},
        ValueError,
        "reduce_op: 'avg' or 'sum' is expected, got 'max'",
    ),
    "param_dtype": (
        lambda mesh: nn.Linear(8, 8),
        {"param_dtype": torch.int8},
        TypeError,
        "weight: param_dtype: a floating-point dtype is expected, got torch.int8",
    ),
    "param_dtype_function": (
        lambda mesh: nn.Linear(8, 8),
        {"param_dtype": lambda f, m, p: "bf16"},
        TypeError,
        "weight: param_dtype: a floating-point dtype is expected, got bf16",
    ),
    "main_grad_dtype": (
        lambda mesh: nn.Linear(8, 8),
        {"main_grad_dtype": torch.int32},
        TypeError,
        "main_grad_dtype: a floating-point dtype is expected, got torch.int32",
    ),
    "src_data_rank": (
        lambda mesh: nn.Linear(8, 8),
        {"src_data_rank": 4},
        ValueError,
        "src_data_rank: a rank of the mesh (0 to 3) is expected, got 4",
    ),
    "no_such_dim": (
        lambda mesh: nn.Linear(8, 8),
        {"shard_fn": lambda f, m, p: Shard(1)},
        ValueError,
        "bias: can't shard dim 1 of shape (8,)",
    ),
    "no_placement": (
        lambda mesh: nn.Linear(8, 8),
        {"shard_fn": lambda f, m, p: 0},
        TypeError,
        "weight: shard_fn returns Shard(dim), Replicate(), a sequence of them, or None, got 0",
    ),
    "partial": (
        lambda mesh: nn.Linear(8, 8),
        {"shard_fn": lambda f, m, p: Partial()},
        TypeError,
        "weight: shard_fn returns Shard(dim), Replicate(), a sequence of them, or None, got Partial(sum)",
    ),
    "integers": (
        lambda mesh: Experts(),
        {"shard_fn": lambda f, m, p: Replicate()},
        ValueError,
        "counts: only floating-point parameters are placed, this one is torch.int64; return None",
    ),
    "rnn": (
        lambda mesh: nn.LSTM(8, 8),
        {},
        ValueError,
        "weight_ih_l0: LSTM keeps its weights in a list of its own, which gtp_compile can't follow; let shard_fn "
        "return None for it and reduce its gradients with DistributedDataParallel",
    ),
    "foreign_dtensor": (
        lambda mesh: dtensor_linear(mesh),
        {},
        ValueError,
        "weight: is a DTensor of another tool; let shard_fn return None for it, or shard it here only",
    ),
    "twice": (
        lambda mesh: nn.Sequential(gtp_compile.shard(nn.Linear(8, 8), mesh)),
        {},
        ValueError,
        "0.weight: is sharded already; call shard once, on the outermost module",
    ),
    "overlap": (
        lambda mesh: overlapping(),
        {"shard_fn": shard_all},
        ValueError,
        "c: shares memory with b, but is another Parameter; tie them by assigning one Parameter to both modules, or "
        "give one of them memory of its own",
    ),
    "overlap_with_a_plain_one": (
        lambda mesh: overlapping(),
        {"shard_fn": lambda f, m, p: Shard(0) if f == "c" else None},
        ValueError,
        "c: shares memory with b, but is another Parameter; tie them by assigning one Parameter to both modules, or "
        "give one of them memory of its own",
    ),
}


def dtensor_linear(mesh) -> nn.Module:
    model = nn.Linear(8, 8, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    return model


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_do(case, mesh):
    build, kwargs, kind, message = REFUSALS[case]
    kwargs = dict(kwargs)
    over = kwargs.pop("mesh", mesh)
    if isinstance(over, tuple):
        over = init_device_mesh("cpu", over)
    model = build(mesh)
    before = {n: (type(p), p.shape) for n, p in model.named_parameters()}
    with pytest.raises(kind) as caught:
        gtp_compile.shard(model, over, **kwargs)
    assert str(caught.value) == message
    assert {n: (type(p), p.shape) for n, p in model.named_parameters()} == before, "a refused model is as it was"


def test_foreign_dtensor_may_stay(mesh):
    model = nn.Sequential(dtensor_linear(mesh), nn.Linear(8, 8))
    theirs = model[0].weight
    gtp_compile.shard(model, mesh, shard_fn=lambda f, m, p: None if f == "0.weight" else Replicate())
    assert model[0].weight is theirs and isinstance(model[1].weight, gtp_compile.parameters.ShardedParameter)


def test_adjacent_slices_of_one_buffer_are_weights_of_their_own(mesh):
    base = torch.arange(32.0)
    model = nn.Module()
    model.a, model.b = nn.Parameter(base[:16]), nn.Parameter(base[16:])
    gtp_compile.shard(model, mesh, shard_fn=shard_all, src_data_rank=None)
    assert model.b.leaf.tolist() == [16.0, 17.0, 18.0, 19.0]


def test_assignment_to_a_placed_weight_writes_the_shard(mesh):
    model = gtp_compile.shard(nn.Linear(8, 8), mesh, shard_fn=shard_all)
    param = model.weight
    model.weight = nn.Parameter(torch.arange(64.0).view(8, 8))
    assert model.weight is param and torch.equal(param.leaf, torch.arange(16.0).view(2, 8))
    model.weight = model.weight  # what some libraries do to tie weights
    assert model.weight is param


@pytest.mark.parametrize(
    ("value", "got"),
    [(nn.Parameter(torch.zeros(2, 8)), "(2, 8)"), (None, "None")],
    ids=["a_shard", "nothing"],
)
def test_another_shape_in_its_place_is_refused(value, got, mesh):
    model = gtp_compile.shard(nn.Sequential(nn.Linear(8, 8)), mesh, shard_fn=shard_all)
    with pytest.raises(ValueError) as caught:
        model[0].weight = value
    assert str(caught.value) == (
        f"0.weight: is a sharded parameter of shape (8, 8), and can't be replaced by {got}; change the module before "
        "gtp_compile.shard"
    )


def test_a_sharded_model_is_still_itself(mesh):
    model = Zoo()
    names, keys, text = [n for n, _ in model.named_parameters()], list(model.state_dict()), str(model)
    gtp_compile.shard(model, mesh)
    assert [n for n, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys
    assert str(model) == text
    assert isinstance(model.dense, nn.Linear) and type(model.dense).__name__ == "Linear"
    assert type(model.dense).__module__ == nn.Linear.__module__
    assert type(model.stacked).__qualname__ == "Experts"
    other = gtp_compile.shard(Zoo(), mesh)
    assert type(model.dense) is type(other.dense), "one class for equal modules, so that they share graphs"
    assert isinstance(model.dense.weight, nn.Parameter)
    assert isinstance(model.dense.weight.leaf, gtp_compile.DistributedWeight)


def test_a_tensor_hook_would_never_fire(mesh):
    model = gtp_compile.shard(nn.Linear(8, 8), mesh)
    with pytest.raises(NotImplementedError, match=r"^weight: .*use register_post_accumulate_grad_hook"):
        model.weight.register_hook(print)
