"""Meshes of several dims: sharded over one of them, replicated over the others; other axes for other weights."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import (
    BF16,
    FP32,
    close,
    close_main_grad,
    compiled,
    expect,
    no_outstanding_work,
    reductions,
    spy,
    whole,
)
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from uneven import Uneven, along_out, local_rows, loss, mesh_of, message, rows, start

import gtp_compile


def other_axes(fqn: str, module: nn.Module, param: nn.Parameter) -> Any:
    """Dense weights over the first mesh dim, experts over the second, biases over none."""
    if param.ndim == 1:
        return [Replicate(), Replicate()]
    dim = Shard(param.ndim - 2)
    return [Replicate(), dim] if isinstance(module, gtp_compile.GroupedLinear) else [dim, Replicate()]


def over_first(fqn: str, module: nn.Module, param: nn.Parameter) -> Any:
    """Sharded over the first mesh dim, replicated over the last."""
    return [Shard(param.ndim - 2) if param.ndim > 1 else Replicate(), Replicate()]


PLACES = {"last": along_out, "first": over_first, "other_axes": other_axes}


def trained(rank: int, shape: tuple[int, ...], place: str, op: str) -> list[str]:
    """Two steps of stock AdamW with clipping, against the twin's; the collectives of the last one."""
    model, twin = start(shape, shard_fn=PLACES[place], reduce_op=op)
    step = compiled(model)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.masters.values(), lr=1e-2)
    for i in range(2):
        ours.zero_grad()
        with spy() as seen:
            loss(step(*rows(rank, i))).backward()
        want = twin.gradients(rows(rank, i)[0], op)
        for name, param in model.named_parameters():
            close_main_grad(param, want[name])
        expect("dtypes on the wire", {c.dtype for c in reductions(seen)}, {FP32})
        # As PyTorch wants it where parameters lie on different mesh dims: norms of each set are gathered first.
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        close("norm", total.full_tensor(), torch.nn.utils.clip_grad_norm_(twin.masters.values(), 0.5))
        ours.step()
        theirs.step()
        for name, param in model.named_parameters():
            close(f"step {i}: {name}", whole(param, param), twin.masters[name], 1e-5)
    no_outstanding_work()
    return [f"{c.kind} {c.dtype}" for c in seen]  # shards of other rows differ in size


@pytest.mark.parametrize(
    ("shape", "place", "op"),
    [
        ((2, 2), "last", "avg"),
        ((2, 2), "first", "sum"),
        ((2, 2), "other_axes", "avg"),
        ((4, 1), "other_axes", "avg"),  # dense weights over four ranks, experts over one
        ((1, 4), "other_axes", "sum"),
        ((2, 1, 2), "last", "avg"),
    ],
    ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else v,
)
def test_training_equals_the_unsharded_twin(shape, place, op):
    seen = run_ranks(trained, 4, shape, place, op)
    assert all(s == seen[0] for s in seen)


def wire(rank: int, place: str) -> list[tuple[str, int]]:
    model, _ = start((2, 2), shard_fn=PLACES[place])
    y = loss(compiled(model)(*rows(rank)))
    with spy() as seen:
        y.backward()
    expect("dtypes", {c.dtype for c in reductions(seen)}, {FP32})
    return sorted((c.kind, c.numel) for c in reductions(seen))


def padded(size: int) -> int:
    return size + size % 2


@pytest.mark.parametrize("place", ["last", "first"])
@pytest.mark.works("a (replicate, shard) mesh", "reduce-scatter over one dim, all-reduce of the shard over the other")
def test_a_gradient_is_scattered_over_one_dim_and_the_shard_summed_over_the_other(place):
    # wide [13, 16], few [5, 13], one [1, 5], three experts [7, 16], three stacked [6, 16]; the shards of two ranks
    weights = [(13, 16), (5, 13), (1, 5), (7, 3 * 16), (6, 3 * 16)]
    for rank, seen in enumerate(run_ranks(wire, 4, place)):
        place_in_group = rank % 2 if place == "last" else rank // 2
        scattered = [("reduce_scatter", padded(n) * k) for n, k in weights]
        summed = [("all_reduce", local_rows(n, 2, place_in_group) * k) for n, k in weights]
        biases = 2 * [("all_reduce", 13)] + 2 * [("all_reduce", 3 * 7)]  # over each of the two dims
        assert seen == sorted(scattered + summed + biases)


def groups_used(rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each weight, the ranks that hold its shards, and those that hold the same one."""
    model, _ = start((2, 2), shard_fn=other_axes)
    found = {}
    for name, param in model.named_parameters():
        groups = [dist.distributed_c10d._resolve_process_group(g) for g in param.leaf.mesh_layout.group_names]
        found[name] = tuple(tuple(dist.get_process_group_ranks(g)) for g in groups)
    return found


@pytest.mark.works("`shard_fn` with a placement per mesh dim", "dense and expert weights over groups of their own")
def test_dense_and_expert_weights_have_groups_of_their_own():
    rows_, columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    for rank, found in enumerate(run_ranks(groups_used, 4)):
        assert found["wide.weight"] == (columns[rank], rows_[rank])
        assert found["experts.weight0"] == found["stacked.weight"] == (rows_[rank], columns[rank])
        assert found["wide.bias"] == (columns[rank], rows_[rank])  # replicated: in mesh order


def values(rank: int, src: int | None) -> None:
    torch.manual_seed(1 if src is None else rank)
    model = Uneven()
    model.register_buffer("seen", torch.randn(3))
    want = {n: p.detach().clone() for n, p in (*model.named_parameters(), *model.named_buffers())}
    if src is not None:
        for value in want.values():
            dist.broadcast(value, src)
    gtp_compile.shard(model, mesh_of(2, 2), shard_fn=other_axes, src_data_rank=src)
    for name, param in model.named_parameters():
        expect(name, torch.equal(param.full_tensor(), want[name]), True)
    expect("buffer", torch.equal(model.seen, want["seen"]), True)


@pytest.mark.parametrize("src", [None, 0, 1, 2, 3])
def test_everybody_gets_the_source_ranks_values(src):
    run_ranks(values, 4, src)


def unequal(rank: int, odd: int) -> str:
    torch.manual_seed(1)
    model = Uneven()
    with torch.no_grad():
        model.few.weight[4, 12] += rank == odd
    place = {"shard_fn": along_out, "src_data_rank": None}
    return message(ValueError, lambda: gtp_compile.shard(model, mesh_of(2, 2), **place))


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_unequal_ranks_are_an_error_on_every_rank_without_a_source_rank(odd):
    """Also on those that share no group with the odd one, which would wait for the others for ever."""
    for told in run_ranks(unequal, 4, odd, timeout=60.0):
        assert told.startswith(f"few.weight: its values on rank(s) [{odd}] differ from those on rank 0; ")


def sub_mesh(rank: int) -> None:
    """Two dims of a mesh of three."""
    torch.manual_seed(1)
    model = nn.Linear(16, 13)
    full = model.weight.detach().clone()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipeline", "replicas", "shards"))["replicas", "shards"]
    gtp_compile.shard(model, mesh, shard_fn=along_out, param_dtype=BF16)
    expect("rows", len(model.weight.leaf), local_rows(13, 2, rank % 2))
    loss(compiled(model)(rows(rank)[0])).backward()
    expect("whole", torch.equal(model.weight.full_tensor(), full), True)


def test_a_mesh_that_is_part_of_another():
    run_ranks(sub_mesh, 4)


def looked_at(rank: int) -> tuple[dict[str, Any], dict[str, Any], str]:
    model, _ = start((2, 2), shard_fn=other_axes)
    options = {"inner": "eager"}
    found = gtp_compile.verify(model, loss, options=options)(*rows(rank))
    guess = gtp_compile.explain(model, loss, options=options)(*rows(rank))
    return found.to_dict(), guess.to_dict(), str(guess)


def test_verify_and_explain():
    results = run_ranks(looked_at, 4)
    sizes = {"wide.weight": (13, 16), "few.weight": (5, 13), "one.weight": (1, 5), "experts.weight0": (7, 3 * 16)}
    for found, guess, _ in results:
        assert found == results[0][0]
        for row in found["groups"] + found["others"]:
            assert row["matched"] and row["error"] < 1e-6 and row["sum_dtype"] == "float32", row
        rows_ = {r["leader"]: r for r in guess["groups"] + guess["others"]}
        for leader, (n, k) in sizes.items():
            row, scattered = rows_[leader], padded(n) * k
            assert row["layout"] == "Shard(0) over 2 x 2 ranks, avg"
            # (W - 1) / W of the padded gradient once, then (R - 1) / R of the padded shard twice
            assert row["wire_bytes"] == 4 * scattered // 2 + 2 * 4 * scattered // 2 // 2
            assert {"Mod(-N, W)", "R"} <= {s for s in ("Mod(-N, W)", "R") if s in row["wire_formula"]}
        assert rows_["wide.bias"]["wire_bytes"] == 2 * (2 * 4 * 13 // 2)
        assert {"R0", "R1"} <= {s for s in ("R0", "R1") if s in rows_["wide.bias"]["wire_formula"]}


def refused(rank: int) -> list[str]:
    model = Uneven()

    def told(place: Any) -> str:
        kind = TypeError if place == 7 else ValueError
        return message(kind, lambda: gtp_compile.shard(model, mesh_of(2, 2), shard_fn=lambda f, m, p: place))

    return [told([Shard(0)]), told([Shard(0), Shard(0)]), told(7)]


def test_refusals():
    for told in run_ranks(refused, 4):
        assert told == [
            "wide.weight: one placement per mesh dim is expected (2), shard_fn gave 1",
            "wide.weight: can be sharded over one mesh dim only, shard_fn gave (Shard(dim=0), Shard(dim=0)); flatten "
            "the two dims",
            "wide.weight: shard_fn returns Shard(dim), Replicate(), a sequence of them, or None, got 7",
        ]
