"""Stock optimizers, norms, hooks and checkpoints on the registered parameters."""

import pytest
import torch
from dist_helpers import BF16, close, compiled, double_leaf, expect, linear64, reduced, sharded, spy, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Net(nn.Module):
    """x bf16[R, 16] -> up [R, 32] (sharded) -> bias (replicated) -> down [R, 16] (sharded)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Twin(nn.Module):
    """The unsharded model: float32 masters, computed with in bf16, exact weight gradients."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.masters = [p.detach().clone().requires_grad_() for p in model.parameters()]

    def backward(self, x: Tensor) -> None:
        up, bias, down = (double_leaf(m) for m in self.masters)
        linear64(torch.relu(linear64(x, up, bias)), down).float().pow(2).mean().backward()
        for master, leaf in zip(self.masters, (up, bias, down), strict=True):
            master.grad = reduced(leaf.grad).float()


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(100 * step + rank)).to(BF16)


def loss(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def start():
    torch.manual_seed(1)
    model = Net()
    twin = Twin(model)
    sharded(model)
    return model, twin, compiled(model)


def adamw(rank: int, kwargs: dict[str, bool]) -> None:
    model, twin, step = start()
    ours = torch.optim.AdamW(model.parameters(), lr=1e-2, **kwargs)
    theirs = torch.optim.AdamW(twin.masters, lr=1e-2)
    for i in range(3):
        loss(step(rows(rank, i))).backward()
        twin.backward(rows(rank, i))
        grads = [whole(p, p.grad) for p in model.parameters()]
        want = torch.cat([g.flatten() for g in grads]).norm()
        got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor()
        close(f"step {i}: the norm of these gradients", got, want, 1e-6)
        expect("clipping is at work", bool(got > 0.01), True)
        for name_param, before in zip(model.named_parameters(), grads, strict=True):
            name, param = name_param
            close(f"{name}: clipped main_grad", whole(param, param.main_grad), before * (0.01 / (want + 1e-6)), 1e-5)
        torch.nn.utils.clip_grad_norm_(twin.masters, 0.01)
        ours.step()
        theirs.step()
        ours.zero_grad()
        for (name, param), master in zip(model.named_parameters(), twin.masters, strict=True):
            close(f"step {i}: {name}", whole(param, param), master, 1e-5)


@pytest.mark.parametrize(
    "kwargs", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=["foreach", "plain", "fused"]
)
def test_adamw_and_clip_grad_norm_equal_the_unsharded_twin(kwargs):
    run_ranks(adamw, 2, kwargs)


def hooked(rank: int) -> None:
    model, _, step = start()
    fired: list[tuple[str, Tensor]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.main_grad.clone())))
    names = [n for n, _ in model.named_parameters()]
    for i in range(2):
        for run in (step, model):  # compiled, and in eager
            fired.clear()
            loss(run(rows(rank, i))).backward()
            expect("hooks that fired, once each", sorted(n for n, _ in fired), sorted(names))
            for name, seen in fired:
                final = model.get_parameter(name).main_grad
                expect(f"{name}: main_grad was final when the hook fired", torch.equal(seen, final), True)


def test_users_hooks_fire_once_when_main_grad_is_final():
    run_ranks(hooked, 2)


def optimizer_in_backward(rank: int) -> None:
    """The classic use of these hooks: step each parameter and drop its gradient while backward goes on."""
    model, twin, step = start()
    ours = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(param: nn.Parameter) -> None:
        ours[param].step()
        ours[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    theirs = torch.optim.SGD(twin.masters, lr=0.1)
    for i in range(3):
        loss(step(rows(rank, i))).backward()
        twin.backward(rows(rank, i))
        theirs.step()
        for (name, param), master in zip(model.named_parameters(), twin.masters, strict=True):
            expect(f"{name}: .grad", param.grad, None)
            close(f"step {i}: {name}", whole(param, param), master, 1e-6)


def test_optimizer_in_backward():
    run_ranks(optimizer_in_backward, 2)


def checkpointed(rank: int) -> None:
    torch.manual_seed(1)
    model = Net()
    want = {n: p.detach().clone() for n, p in model.state_dict().items()}
    sharded(model)
    saved = model.state_dict()
    expect("keys", list(saved), list(want))
    for name, value in saved.items():
        expect(f"{name}: is a DTensor", isinstance(value, DTensor), True)
        expect(f"{name}: its global shape", value.shape, want[name].shape)
        expect(f"{name}: its values", torch.equal(value.full_tensor(), want[name]), True)
    saved = {n: v.clone() for n, v in saved.items()}
    step = compiled(model)
    x = rows(rank, 0)
    before = step(x)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(1)
    expect("new values are computed with", torch.equal(before, step(x)), False)
    addresses = [p.leaf.data_ptr() for p in model.parameters()]
    with spy() as seen:
        model.load_state_dict(saved)
    expect("collectives of load_state_dict", seen, [])
    expect("the leaves stay in their memory", [p.leaf.data_ptr() for p in model.parameters()], addresses)
    expect("loaded values are computed with", torch.equal(before, step(x)), True)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved, assign=True)
    expect("the leaves stay in their memory, too", [p.leaf.data_ptr() for p in model.parameters()], addresses)
    expect("assigned values are computed with", torch.equal(before, step(x)), True)


def test_state_dict_and_back():
    run_ranks(checkpointed, 2)
