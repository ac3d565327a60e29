"""float32 shards computed with in bf16, bf16 shards with float32 main_grad, autocast, fp16 with a scaler."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import (
    BF16,
    FP16,
    FP32,
    close,
    close_main_grad,
    compiled,
    expect,
    reductions,
    spy,
    whole,
    world_mesh,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from uneven import (
    Uneven,
    UnevenTwin,
    along_out,
    expect_equal,
    loss,
    mesh_of,
    message,
    rows,
    start,
    whole_values,
)

import gtp_compile
from gtp_compile import MainGradOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


class NarrowTwin(UnevenTwin):
    """A bf16 model whose optimizer keeps float32 masters: forward reads the masters, rounded."""


def narrow(shape: tuple[int, ...], **kwargs: Any) -> tuple[Uneven, NarrowTwin]:
    torch.manual_seed(1)
    model = Uneven().bfloat16()
    twin = NarrowTwin(model)
    twin.masters = {n: m.detach().float().requires_grad_() for n, m in twin.masters.items()}
    gtp_compile.shard(model, mesh_of(*shape), shard_fn=along_out, **kwargs)
    return model, twin


# bf16 shards, float32 main_grad.


def main_grad_optimizer(rank: int, shape: tuple[int, ...], name: str) -> None:
    cls, kwargs = OPTIMIZERS[name]
    model, twin = narrow(shape)
    step = compiled(model)
    ours = MainGradOptimizer(model.parameters(), cls, **kwargs)
    theirs = cls(twin.masters.values(), **kwargs)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (ours, theirs)]
    for i in range(3):
        ours.zero_grad()
        addresses = [p.main_grad.data_ptr() for p in model.parameters()]
        with spy() as seen:
            loss(step(*rows(rank, i))).backward()
        expect("wire", {c.dtype for c in reductions(seen)}, {FP32})
        want = twin.gradients(rows(rank, i)[0])
        for n, param in model.named_parameters():
            close_main_grad(param, want[n])
            expect(f"{n}: .grad", (param.grad, param.dtype), (None, BF16))
        close(
            "norm", ours.clip_grad_norm_(0.5).full_tensor(), torch.nn.utils.clip_grad_norm_(twin.masters.values(), 0.5)
        )
        expect("fed without a copy", [p.grad._local_tensor.data_ptr() for p in ours.main_params()], addresses)
        ours.step()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        expect("learning rates", ours.param_groups[0]["lr"], theirs.param_groups[0]["lr"])
        expect("the inner one's", ours.inner.param_groups[0]["lr"], theirs.param_groups[0]["lr"])
        for (n, param), master in zip(model.named_parameters(), ours.main_params(), strict=True):
            expect(f"{n}: master", (master.dtype, master.shape), (FP32, param.shape))
            close(f"step {i}: {n}: master", whole(param, master), twin.masters[n], 1e-5)
            expect(f"{n}: the shard is it, rounded", torch.equal(param.leaf, master._local_tensor.to(BF16)), True)
    ours.zero_grad()
    expect("zero_grad", any(bool(p.main_grad.any()) for p in model.parameters()), False)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("bf16 shards with `gtp.MainGradOptimizer`", "float32 masters, fed from main_grad without a copy")
def test_main_grad_optimizer_equals_float32_masters(shape, name):
    run_ranks(main_grad_optimizer, 4, shape, name)


def small_updates(rank: int) -> float:
    """Updates below a bf16 step of the weight add up in the masters; in the shards alone they would be lost."""
    model = nn.Linear(16, 13, bias=False, dtype=BF16)
    nn.init.ones_(model.weight)
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out)
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for _ in range(8):
        model.weight.main_grad.fill_(-(2.0**-10))  # the step of bf16 above 1 is 2^-7
        optimizer.step()
    return model.weight.full_tensor().max().item()


def test_small_updates_add_up():
    assert run_ranks(small_updates, 2) == [1 + 2.0**-7] * 2


def round_trip(rank: int, shape: tuple[int, ...]) -> None:
    """state_dict of the optimizer: train, save, train; load, train again: the same."""
    model, _ = narrow(shape)
    step = compiled(model)
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)

    def train(i: int) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss(step(*rows(rank, i))).backward()
        optimizer.step()
        return {n: p.leaf.detach().clone() for n, p in model.named_parameters()}

    train(0)
    saved, values = copy.deepcopy(optimizer.state_dict()), {n: v.clone() for n, v in model.state_dict().items()}
    expect(
        "masters are DTensors of the whole's shape",
        [m.shape for m in saved["masters"]],
        [p.shape for p in model.parameters()],
    )
    want = [train(1), train(2)]
    for _ in range(2):
        model.load_state_dict(values)
        optimizer.load_state_dict(copy.deepcopy(saved))
        for got, expected in zip([train(1), train(2)], want, strict=True):
            for name, value in expected.items():
                expect(name, torch.equal(got[name], value), True)
        optimizer = MainGradOptimizer(model.parameters(), torch.optim.AdamW, lr=7.0)  # a new one, as after a restart


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_main_grad_optimizers_state_dict(shape):
    run_ranks(round_trip, 4 if len(shape) > 1 else 2, shape)


def groups(rank: int) -> Any:
    """Parameter groups, wide parameters beside narrow ones, a state of another length."""
    torch.manual_seed(1)
    model = Uneven().bfloat16()
    model.wide.float()
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out)
    wide = list(model.wide.parameters())
    rest = [p for n, p in model.named_parameters() if not n.startswith("wide")]
    optimizer = MainGradOptimizer([{"params": wide, "lr": 0.0}, {"params": rest}], torch.optim.SGD, lr=1.0)
    expect("a wide one is its own master", optimizer.param_groups[0]["params"][0] is wide[0], True)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    for param in model.parameters():
        param.main_grad.fill_(1.0)
        if param.dtype == FP32:
            param.grad = gtp_compile.parameters.like(param, param.main_grad)
    optimizer.step()
    for name, param in model.named_parameters():
        moved = not torch.equal(param.full_tensor(), before[name])
        expect(f"{name} moved", moved, not name.startswith("wide"))
    optimizer.zero_grad()
    expect("a wide one's .grad", wide[0].grad, None)
    state = optimizer.state_dict()
    state["masters"] = state["masters"][1:]
    return message(ValueError, lambda: optimizer.load_state_dict(state))


def test_groups_and_wide_parameters():
    for told in run_ranks(groups, 2):
        assert told == "9 masters expected, the state has 8"


def stock(rank: int) -> list[str]:
    model, _ = narrow((2,))
    told = []
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = cls(model.parameters(), lr=0.1)
        loss(model(*rows(rank))).backward()
        told.append(message(RuntimeError, optimizer.step))
    expect("plain models are left alone", plain_steps(), True)
    wide, _ = start((2,))
    torch.optim.AdamW(wide.parameters()).step()  # no gradient yet: nothing to do, as ever
    return told


def plain_steps() -> bool:
    model = nn.Linear(4, 4, dtype=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    optimizer.step()
    return not torch.equal(before, model.weight)


@pytest.mark.works("bf16 shards with a stock optimizer", "refused; the message names the two ways out")
def test_a_stock_optimizer_on_narrow_shards_raises_with_both_ways_out():
    for told in run_ranks(stock, 2):
        for text, name in zip(told, ("AdamW", "SGD"), strict=True):
            assert text == (
                "wide.weight: is torch.bfloat16, its gradient is in its torch.float32 main_grad, and "
                f"{name} would skip it. Wrap the optimizer: gtp_compile.MainGradOptimizer(model.parameters(), "
                f"torch.optim.{name}, ...); or keep the shards in float32: gtp_compile.shard(model.float(), mesh, "
                "param_dtype=torch.bfloat16)"
            )


# Autocast.


class Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return self.model(x, splits)


def autocast(rank: int, outside: bool) -> dict[str, Any]:
    """A float32 model under autocast: weights are gathered in float32, the GEMMs run in bf16, gradients are float32."""
    model, twin = start((4,), param_dtype=None)
    x, splits = rows(rank)
    step = compiled(model if outside else Autocast(model))
    with spy() as seen:
        if outside:
            with torch.autocast("cpu", BF16):
                y = step(x.float(), splits)
        else:
            y = step(x.float(), splits)
        expect("computed in bf16", y.dtype, BF16)
        loss(y).backward()
    expect("dtypes on the wire", {c.dtype for c in seen}, {FP32})
    want = twin.gradients(x)
    for name, param in model.named_parameters():
        close_main_grad(param, want[name], 2.0**-6)
    return gtp_compile.verify(Autocast(model), loss, options={"inner": "eager"})(x.float(), splits).to_dict()


@pytest.mark.parametrize("outside", [False, True], ids=["in_the_model", "around_it"])
@pytest.mark.works("`torch.autocast` over a float32 model", "wgrad in float32 out of the GEMM all the same")
def test_autocast_over_a_float32_model(outside):
    for found in run_ranks(autocast, 4, outside):
        for row in found["groups"]:
            assert row["matched"] and row["error"] < 1e-6, row
            assert {row["gemm_dtype"], row["wire_dtype"]} == {"float32"}, row


# What else happens to narrow shards.


def written(rank: int) -> None:
    """Values that are loaded after the optimizer was made are what it goes on from."""
    model, _ = narrow((2,))
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.SGD, lr=0.0)
    loss(compiled(model)(*rows(rank))).backward()
    state = {n: torch.full(p.shape, 5.0, dtype=BF16) for n, p in model.named_parameters()}
    model.load_state_dict(state)
    optimizer.step()
    expect_equal("values", whole_values(model), state)
    expect("masters", {float(m.full_tensor().mean()) for m in optimizer.main_params()}, {5.0})


def test_values_written_behind_the_optimizers_back():
    run_ranks(written, 2)


def frozen(rank: int) -> None:
    """A frozen weight is not decayed, and costs no accumulator; a stock optimizer takes it."""
    torch.manual_seed(1)
    model = Uneven().bfloat16()
    model.few.weight.requires_grad_(False)
    gtp_compile.shard(model, mesh_of(2), shard_fn=along_out)
    expect("no accumulator", model.few.weight.main_grad, None)
    before = model.few.weight.full_tensor().clone()
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss(compiled(model)(*rows(rank))).backward()
        model.one.weight.requires_grad_(False)  # in the middle of training
        one = model.one.weight.full_tensor().clone()
        optimizer.step()
        expect("frozen later", torch.equal(model.one.weight.full_tensor(), one), True)
    expect("frozen", torch.equal(model.few.weight.full_tensor(), before), True)
    torch.optim.AdamW([model.few.weight], lr=1e-2).step()
    model.few.weight.requires_grad_(True)
    expect("an accumulator when it is trained", model.few.weight.main_grad.dtype, FP32)
    model.few.weight.main_grad = None
    model.few.weight.requires_grad_(True)
    expect("None stays", model.few.weight.main_grad, None)


def test_frozen_narrow_shards():
    run_ranks(frozen, 2)


def scaled_narrow(rank: int) -> None:
    """fp16 shards: the scaler finds the float32 gradients, the first time too."""
    torch.manual_seed(1)
    model = Uneven().half()
    gtp_compile.shard(model, mesh_of(2), shard_fn=along_out)
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.SGD, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    step, (x, splits) = compiled(model), rows(rank)
    for i in range(2):
        optimizer.zero_grad()
        scaler.scale(loss(step(x.half(), splits))).backward()
        scaled = model.wide.weight.main_grad.clone()
        if i == 1 and rank == 1:
            model.wide.weight.main_grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        if i == 0:
            expect("unscaled", torch.equal(model.wide.weight.main_grad, scaled / 8), True)
        before = model.wide.weight.leaf.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        expect("stepped", torch.equal(model.wide.weight.leaf, before), i == 1)
    expect("scale", scaler.get_scale(), 4.0)


@pytest.mark.works("fp16 shards, `GradScaler` and `gtp.MainGradOptimizer`", "unscales the float32 gradients")
def test_grad_scaler_with_main_grad_optimizer():
    run_ranks(scaled_narrow, 2)


def zeroed_by_the_model(rank: int) -> None:
    """model.zero_grad() means the accumulators, too; a penalty on the weights themselves counts."""
    model, _ = narrow((2,))
    step = compiled(model)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss(step(*rows(rank))).backward()
        found.append(model.wide.weight.main_grad.clone())
    expect("the same twice", torch.equal(*found), True)
    model.zero_grad()
    (loss(step(*rows(rank))) + model.wide.weight.float().sum().full_tensor()).backward()
    close("with a penalty", model.wide.weight.main_grad, found[0] + 1, 1e-6)
    expect(".grad", model.wide.weight.grad, None)


def test_zero_grad_and_penalties_on_narrow_shards():
    run_ranks(zeroed_by_the_model, 2)


def grouped_params(rank: int) -> None:
    """named_parameters, and groups that are added later."""
    model, _ = narrow((2,))
    named = list(model.named_parameters())
    optimizer = MainGradOptimizer(named[:2], torch.optim.SGD, lr=0.5)
    optimizer.add_param_group({"params": named[2:], "lr": 0.25})
    before = whole_values(model)
    loss(compiled(model)(*rows(rank))).backward()
    grads = {n: whole(p, p.main_grad) for n, p in named}
    optimizer.step()
    for i, (name, param) in enumerate(named):
        want = before[name].double() - (0.5 if i < 2 else 0.25) * grads[name]
        close(name, param.full_tensor().double(), want.to(BF16).double(), 1e-2)


def test_named_parameters_and_added_groups():
    run_ranks(grouped_params, 2)


def without_accumulator(rank: int) -> None:
    """main_grad taken away after the optimizer was made: it follows `.grad`."""
    model, _ = narrow((2,))
    optimizer = MainGradOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    param = model.wide.weight
    param.main_grad = None
    loss(compiled(model)(*rows(rank))).backward()
    want = param.full_tensor().double() - 0.5 * whole(param, param.grad)
    optimizer.step()
    close("stepped", param.full_tensor().double(), want, 1e-2)


def test_main_grad_taken_away():
    run_ranks(without_accumulator, 2)


# fp16 with a scaler.


def scaled(rank: int, shape: tuple[int, ...]) -> None:
    """inf in one shard (on all its replicas): every rank skips that step, and halves its scale."""
    model, _ = start(shape, param_dtype=FP16)
    step = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for i in range(3):
        optimizer.zero_grad()
        x, splits = rows(rank, i)
        scaler.scale(loss(step(x.half(), splits))).backward()
        expect("fp32 main_grad", model.few.weight.main_grad.dtype, FP32)
        if i == 1 and model.wide.weight.leaf.shard_rank == 1:
            model.wide.weight.main_grad[0, 0] = float("inf")
        before = {n: p.leaf.detach().clone() for n, p in model.named_parameters()}
        if i != 0:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expect("scale", scaler.get_scale(), 8.0 if i == 0 else 4.0)
        for name, param in model.named_parameters():
            if param.leaf.numel():
                expect(f"step {i}: {name} stayed", torch.equal(param.leaf, before[name]), i == 1)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("fp16 with `GradScaler`, an inf in one shard", "the step is skipped on all ranks")
def test_grad_scaler_skips_on_all_ranks(shape):
    run_ranks(scaled, 4, shape)


def overflowing(rank: int) -> None:
    """A real overflow of fp16 in backward, then a scale that fits."""
    model, _ = start((2,), param_dtype=FP16)
    step = compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    x, splits = rows(rank)
    scales = []
    for _ in range(40):
        optimizer.zero_grad()
        scaler.scale(loss(step(x.half(), splits))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, scales)
    expect("ranks agree", everyone[0], everyone[1])
    expect("it came down, and settled", (scales[0], scales[-1] == scales[-2]), (2.0**39, True))
    expect("finite", all(bool(torch.isfinite(p.leaf).all()) for p in model.parameters()), True)


def test_grad_scaler_settles():
    run_ranks(overflowing, 2)


# No main_grad.


def no_main_grad(rank: int, shape: tuple[int, ...], param_dtype: torch.dtype | None) -> dict[str, Any]:
    """The compute dtype all along, and the report says so; `.grad` is an ordinary gradient."""
    model, twin = start(shape, param_dtype=param_dtype, main_grad_dtype=None)
    compute = param_dtype or FP32
    step = compiled(model)
    x, splits = rows(rank)
    total: dict[str, Tensor] = {}
    for i in range(2):
        with spy() as seen:
            loss(step(x.to(compute), splits)).backward()
        expect("wire", {c.dtype for c in reductions(seen)}, {compute})
        for name, grad in twin.gradients(x).items():
            total[name] = total.get(name, 0) + grad
        for name, param in model.named_parameters():
            expect(f"{name}: main_grad", param.main_grad, None)
            expect(f"{name}: .grad", (type(param.grad), param.grad.dtype), (DTensor, FP32))
            close(f"step {i}: {name}", whole(param, param.grad), total[name], 2.0**-6)
            expect(f"{name}: contiguous", param.grad._local_tensor.is_contiguous(), True)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    return gtp_compile.verify(model, loss, options={"inner": "eager"})(x.to(compute), splits).to_dict()


@pytest.mark.parametrize("param_dtype", [BF16, None], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("`main_grad_dtype=None`", "compute dtype all along, and `explain` says so")
def test_without_main_grad_the_compute_dtype_is_used_all_along(shape, param_dtype):
    compute = "bfloat16" if param_dtype else "float32"
    for found in run_ranks(no_main_grad, 4, shape, param_dtype):
        for row in found["groups"]:
            chain = [row[k] for k in ("gemm_dtype", "scratch_dtype", "wire_dtype", "sum_dtype", "main_grad_dtype")]
            assert chain == [compute] * 4 + [None], row
            assert row["error"] < (2e-2 if param_dtype else 1e-6)
