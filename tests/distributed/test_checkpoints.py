"""Checkpoints of a sharded model: logical values on any number of ranks, to the bit, and never a rank's slice."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_helpers import BF16, compiled, expect, spy
from ranks import Pool, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from uneven import Uneven, along_out, expect_equal, loss, mesh_of, message, rows, start, whole_values

import gtp_compile


def trained_model(rank: int, shape: tuple[int, ...], seed: int = 1) -> tuple[Uneven, torch.optim.Optimizer]:
    """Uneven after a step of AdamW, so that the optimizer has a state."""
    model, _ = start(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss(model(*rows(rank, seed))).backward()
    optimizer.step()
    return model, optimizer


def whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every value of the optimizer's state, whole."""
    found = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
    return found


# Over several numbers of ranks.


def save_first(rank: int, folder: str, how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = trained_model(rank, (dist.get_world_size(),))
    save(model, optimizer, folder, how)
    return whole_values(model), whole_states(model, optimizer)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, how: str) -> None:
    values, states = get_state_dict(model, optimizer)
    if how == "async":
        future = dcp.async_save({"model": values, "optimizer": states}, checkpoint_id=folder)
        with torch.no_grad():  # training goes on meanwhile, on the very memory
            before = [p.detach().clone() for p in model.parameters()]
            for param in model.parameters():
                param.add_(1)
        future.result()
        with torch.no_grad():
            for param, value in zip(model.parameters(), before, strict=True):
                param.copy_(value)
    else:
        dcp.save({"model": values, "optimizer": states}, checkpoint_id=folder)


def load_and_save(rank: int, shape: tuple[int, ...], source: str, target: str, how: str) -> Any:
    torch.manual_seed(99)
    model = gtp_compile.shard(Uneven(), mesh_of(*shape), shard_fn=along_out, param_dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values, states = get_state_dict(model, optimizer)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)
    for name, param in model.named_parameters():
        expect(
            f"{name}: exp_avg lies as the parameter does",
            optimizer.state[param]["exp_avg"].placements,
            param.placements,
        )
        expect(f"{name}: the leaf holds it", torch.equal(param.leaf, param.to_local()), True)
    save(model, optimizer, target, how)
    result = whole_values(model), whole_states(model, optimizer)
    loss(compiled(model)(*rows(rank))).backward()  # and it trains on
    optimizer.step()
    return result


@pytest.mark.parametrize("how", ["plain", "async"])
@pytest.mark.works(
    "`torch.distributed.checkpoint`, also `async_save`",
    "model and stock optimizer, onto another number of ranks or another mesh, bitwise",
)
def test_resharding_from_two_to_four_to_one_to_three_ranks_is_exact(how, tmp_path):
    folder = f"{tmp_path}/2"
    want_values, want_states = run_ranks(save_first, 2, folder, how)[0]
    assert len(want_states) == 3 * len(want_values)
    for shape in ((4,), (1,), (3,), (2, 2)):
        target = f"{tmp_path}/{shape}"
        world = shape[0] if len(shape) == 1 else 4
        for values, states in run_ranks(load_and_save, world, shape, folder, target, how):
            assert values.keys() == want_values.keys() and states.keys() == want_states.keys()
            assert all(torch.equal(values[n], v) for n, v in want_values.items())
            assert all(torch.equal(states[n], v) for n, v in want_states.items())
        folder = target


def load_unsharded(folder: str) -> dict[str, Tensor]:
    """Into a plain model, in a process without any process group."""
    state = {"model": Uneven().state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["model"]


@pytest.mark.works("a distributed checkpoint in one process without `shard`", "read by a plain model")
def test_a_plain_model_reads_it_too(tmp_path):
    want, _ = run_ranks(save_first, 2, f"{tmp_path}/2", "plain")[0]
    got = load_unsharded(f"{tmp_path}/2")
    assert got.keys() == want.keys() and all(torch.equal(got[n], v) for n, v in want.items())


# state_dict and load_state_dict.


def loaded(rank: int, shape: tuple[int, ...], given: str, assign: bool) -> None:
    source, _ = start(shape)
    full = {n: torch.randn(p.shape) for n, p in source.named_parameters()}
    with torch.no_grad():
        for name, param in source.named_parameters():
            param.copy_(full[name])
    model, _ = start(shape)
    step = compiled(model)
    step(*rows(rank))
    params = list(model.parameters())
    addresses = [p.leaf.data_ptr() for p in params]
    state = full if given == "full" else {n: v.clone() for n, v in source.state_dict().items()}
    with spy() as seen:
        result = model.load_state_dict(state, assign=assign)
    expect("keys", (result.missing_keys, result.unexpected_keys), ([], []))
    expect("collectives", seen, [])
    expect(
        "the parameters stay the optimizer's",
        [a is b for a, b in zip(params, model.parameters(), strict=True)],
        [True] * len(params),
    )
    expect("in their memory", [p.leaf.data_ptr() for p in model.parameters()], addresses)
    expect_equal("values", whole_values(model), full)
    expect("computed with", torch.equal(step(*rows(rank)), source(*rows(rank))), True)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("given", ["full", "dtensors"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("`load_state_dict`, `assign=True` too", "takes DTensors and whole tensors")
def test_load_state_dict(shape, given, assign):
    run_ranks(loaded, 4, shape, given, assign)


def strict(rank: int) -> list[str]:
    model, _ = start((2,))
    full = whole_values(model)
    missing = {n: v for n, v in full.items() if n != "few.weight"}
    wrong = {**full, "few.weight": full["few.weight"][:3]}
    told = [
        message(RuntimeError, lambda: model.load_state_dict(missing)),
        message(RuntimeError, lambda: model.load_state_dict({**full, "more": full["few.weight"]})),
        message(RuntimeError, lambda: model.load_state_dict(wrong)),
        message((RuntimeError, ValueError), lambda: model.load_state_dict(wrong, assign=True)),
    ]
    result = model.load_state_dict(missing, strict=False)
    expect("missing", (result.missing_keys, result.unexpected_keys), (["few.weight"], []))
    expect_equal("values", whole_values(model), full)
    return told


def test_strict_errors():
    for missing, unexpected, shape, assigned in run_ranks(strict, 2):
        assert 'Missing key(s) in state_dict: "few.weight"' in missing
        assert 'Unexpected key(s) in state_dict: "more"' in unexpected
        for text in (shape, assigned):
            assert "size mismatch for few.weight" in text and "torch.Size([3, 13])" in text


def keys(rank: int) -> None:
    model, twin = start((2,))
    want = list(twin.masters)
    step = compiled(model)
    step(*rows(rank))
    for layer in (model.wide, model.experts):
        layer.compile(backend="gtp", options={"inner": "eager"})
    expect("state_dict", list(model.state_dict()), want)
    expect("named_parameters", [n for n, _ in model.named_parameters()], want)
    optimizer = torch.optim.AdamW(model.parameters())
    for held in (model, step):
        values, states = get_state_dict(held, optimizer)
        expect("get_state_dict", list(values), want)
        expect("optimizer's keys", states["param_groups"][0]["params"], want)
    for value in model.state_dict().values():
        expect("requires no grad", (value.requires_grad, type(value)), (False, DTensor))


@pytest.mark.works("keys of `state_dict`, compiled or not", "as before `shard`")
def test_no_prefixes_in_keys():
    run_ranks(keys, 2)


def full_state_dict(rank: int) -> Any:
    """torch's own way to one file with everything, and back."""
    model, _ = trained_model(rank, (4,))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # A replicated DTensor on CPU is its own whole tensor.
    values = {n: v.clone() for n, v in get_model_state_dict(model, options=options).items()}
    want = whole_values(model)
    if rank == 0:
        expect_equal("rank 0 has it all", values, want)
    else:
        expect("others have nothing", values, {})
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    expect_equal("set again", whole_values(model), want)


@pytest.mark.works("`get_model_state_dict(full_state_dict=True)`", "whole tensors")
def test_full_state_dict_of_torch():
    run_ranks(full_state_dict, 4)


def optimizer_state(rank: int) -> None:
    model, optimizer = trained_model(rank, (2,))
    saved = optimizer.state_dict()
    before = whole_states(model, optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=5.0)
    other.load_state_dict(saved)
    expect_equal("states", whole_states(model, other), before)
    expect("lr", other.param_groups[0]["lr"], 1e-2)


def test_the_optimizers_own_state_dict():
    run_ranks(optimizer_state, 2)


# A whole model in a file, read by other processes.


def model_saved(rank: int, shape: tuple[int, ...], folder: str) -> tuple[dict[str, Tensor], Tensor]:
    model, _ = trained_model(rank, shape)
    torch.save(model, f"{folder}/{rank}.pt")
    with torch.no_grad():
        return whole_values(model), model(*rows(rank))


def model_loaded(rank: int, shape: tuple[int, ...], folder: str) -> tuple[dict[str, Tensor], Tensor]:
    mesh_of(4), mesh_of(2, 2)  # other groups first: names of groups are counted
    model = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    with torch.no_grad():
        y = model(*rows(rank))
    loss(compiled(model)(*rows(rank))).backward()
    return whole_values(model), y


def test_a_model_in_a_file_is_read_by_other_processes(tmp_path):
    shape = (2, 2)
    saved = run_ranks(model_saved, 4, shape, str(tmp_path))
    others = Pool(4)
    try:
        loaded = others.call(model_loaded, (shape, str(tmp_path)), 120.0)
    finally:
        others.close()
    for (values, y), (want, want_y) in zip(loaded, saved, strict=True):
        assert torch.equal(y, want_y)
        assert all(torch.equal(values[n], v) for n, v in want.items())


# A save that is killed.


def killed_rank(rank: int, port_file: str, folder: str) -> None:
    """Save twice; the second time one rank dies while it writes, as a killed job does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    model, optimizer = trained_model(rank, (2,))
    save(model, optimizer, f"{folder}/step1", "plain")
    values = whole_values(model)
    if rank == 0:
        torch.save(values, f"{folder}/want.pt")
    dist.barrier()
    original = torch.save

    def dying(*args: Any, **kwargs: Any) -> None:
        if rank == 1:
            time.sleep(0.5)
            os._exit(9)
        original(*args, **kwargs)

    torch.save = dying  # what DCP's file writer calls for each tensor
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    save(model, optimizer, f"{folder}/step2", "plain")
    raise AssertionError("the save went through without one rank")


def last_good(rank: int, folder: str) -> dict[str, Tensor]:
    """What a restarted job does: the newest folder that is complete."""
    complete = [f for f in sorted(Path(folder).glob("step*")) if (f / ".metadata").exists()]
    expect("complete", [f.name for f in complete], ["step1"])
    model, _ = start((2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values, states = get_state_dict(model, optimizer)
    half = message(BaseException, lambda: dcp.load({"model": values}, checkpoint_id=f"{folder}/step2"))
    expect("a half-written one is refused", "metadata" in half, True)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=str(complete[-1]))
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=states)
    return whole_values(model)


@pytest.mark.works("a save killed half-way", "the one before is whole, the broken one is refused")
def test_a_killed_save_leaves_the_last_good_one(tmp_path):
    """Each save has a folder of its own, and its `.metadata` is written last: by that a whole one is known."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=killed_rank, args=(rank, f"{tmp_path}/store", str(tmp_path)), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    processes[1].join(120)
    assert processes[1].exitcode == 9
    processes[0].join(20)
    processes[0].kill()
    assert (tmp_path / "step2").exists() and list((tmp_path / "step2").iterdir()), "it was in the middle of writing"
    want = torch.load(tmp_path / "want.pt")
    for values in run_ranks(last_good, 2, str(tmp_path)):
        assert all(torch.equal(values[n], v) for n, v in want.items())
