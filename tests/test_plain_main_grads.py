"""`accumulate_into_main_grad`: weights that nobody distributes, with a main_grad, as Megatron has them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gtp_compile
from gtp_compile import GroupedLinear
from gtp_compile.kernels.dense_wgrad import op as dense_op
from gtp_compile.kernels.dense_wgrad_add import op as dense_add_op
from gtp_compile.kernels.grouped_wgrad import op as grouped_op
from gtp_compile.kernels.grouped_wgrad_add import op as grouped_add_op

BF16, FP32 = torch.bfloat16, torch.float32
IN, OUT = 8, 16


def with_main_grads(model: nn.Module, dtype: torch.dtype = FP32) -> nn.Module:
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        p.grad_added_to_main_grad = False
    return model


def compiled(fn: Callable, accumulate: bool = True) -> Callable[..., Tensor]:
    options = {"inner": "eager", "accumulate_into_main_grad": accumulate}
    return torch.compile(fn, backend="gtp", options=options)


def dense() -> nn.Linear:
    linear = with_main_grads(nn.Linear(IN, OUT, dtype=BF16))
    assert isinstance(linear, nn.Linear)
    return linear


def ones(rows: int = 4) -> Tensor:
    return torch.full((rows, IN), 1.0078125, dtype=BF16)  # its square has more bits than bfloat16


def backward(y: Tensor) -> None:
    y.backward(torch.full_like(y, 1.0078125))


WGRAD = torch.full((OUT, IN), 4 * 1.0078125**2)


def test_the_gradient_is_in_main_grad_and_was_never_rounded():
    linear = dense()
    run = compiled(linear)
    backward(run(ones()))
    assert torch.equal(linear.weight.main_grad, WGRAD)
    assert torch.equal(linear.bias.main_grad, torch.full((OUT,), 4 * 1.0078125))
    backward(run(ones()))
    assert torch.equal(linear.weight.main_grad, 2 * WGRAD)
    assert linear.weight.grad_added_to_main_grad is True


class DenseAndExperts(nn.Module):
    """A dense layer, and experts behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, OUT, dtype=BF16)
        self.experts = nn.Parameter(torch.randn(3, OUT, IN, dtype=BF16))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(self.up(x), self.experts, offs=offs)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gemms_add_to_main_grad_themselves(inner, monkeypatch):
    """No other weight gradient is computed."""
    computed = []
    for op in (dense_op, grouped_op, dense_add_op, grouped_add_op):
        (name,) = (n for n in vars(op) if n.endswith("wgrad_reference") or n.endswith("wgrad_add_reference"))
        run = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *args, run=run, name=name: (computed.append(name), run(*args))[1])
    torch.manual_seed(0)
    model = with_main_grads(DenseAndExperts())
    options = {"inner": inner, "accumulate_into_main_grad": True}
    run = torch.compile(model, backend="gtp", options=options)
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for counts in ([2, 0, 3], [1, 4, 4]):
        x, offs = torch.randn(sum(counts), IN).to(BF16), torch.tensor(counts).cumsum(0).int()
        run(x, offs).sum().backward()
        dy = torch.ones(len(x), IN, dtype=torch.float64)
        hidden = model.up(x).detach()
        d_hidden = torch._grouped_mm(dy.to(BF16), model.experts.detach().transpose(1, 2), offs=offs)
        exact["up.weight"] += d_hidden.double().t() @ x.double()
        exact["up.bias"] += d_hidden.double().sum(0)
        for e, (a, b) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            exact["experts"][e] += hidden[a:b].double().t() @ dy[a:b]
    assert computed == ["grouped_wgrad_add_reference", "dense_wgrad_add_reference"] * 2
    for name, p in model.named_parameters():
        error = (p.main_grad - exact[name]).norm() / exact[name].norm()
        assert error <= 1e-6, name


def test_off_by_default():
    linear = dense()
    backward(compiled(linear, accumulate=False)(ones()))
    assert linear.weight.grad.dtype == BF16 and linear.weight.grad.any()
    assert not linear.weight.main_grad.any() and linear.weight.grad_added_to_main_grad is False


def test_weights_without_main_grad_go_on_as_ever():
    linear = nn.Linear(IN, OUT, dtype=BF16)
    backward(compiled(linear)(ones()))
    assert torch.equal(linear.weight.grad, WGRAD.to(BF16))


def test_the_dummy_harms_nobody_who_adds_it():
    linear = dense()
    run = compiled(linear)
    backward(run(ones()))
    dummy = linear.weight.grad
    assert dummy.shape == linear.weight.shape and dummy.dtype == BF16
    assert dummy.untyped_storage().nbytes() == 2, "no memory of the weight's size"
    linear.weight.main_grad.add_(dummy)
    assert torch.equal(linear.weight.main_grad, WGRAD)
    linear.weight.grad = None
    backward(run(ones()))
    assert torch.equal(linear.weight.main_grad, 2 * WGRAD)


def test_hooks_find_a_dummy_and_a_final_main_grad():
    linear = dense()
    seen = []
    node = linear.weight.expand_as(linear.weight).grad_fn.next_functions[0][0]  # as Megatron's buckets do it
    node.register_hook(lambda *_: seen.append((linear.weight.grad is not None, linear.weight.main_grad.clone())))
    backward(compiled(linear)(ones()))
    ((present, main_grad),) = seen
    assert present and torch.equal(main_grad, WGRAD)


def test_overwriting_starts_each_backward_from_zero():
    linear = dense()
    linear.weight.overwrite_main_grad = True
    linear.weight.main_grad.fill_(float("nan"))
    run = compiled(linear)
    for _ in range(2):
        backward(run(ones()))
        assert torch.equal(linear.weight.main_grad, WGRAD)
    assert torch.equal(linear.bias.main_grad, torch.full((OUT,), 8 * 1.0078125)), "the bias accumulates"


class Broken(nn.Module):
    """One weight in two graphs, and in eager code between them."""

    def __init__(self, eager_too: bool) -> None:
        super().__init__()
        self.up = nn.Linear(IN, OUT, bias=False, dtype=BF16)
        self.eager_too = eager_too

    def forward(self, x: Tensor) -> Tensor:
        first = self.up(x)
        torch._dynamo.graph_break()
        if self.eager_too:
            return first + self.up(x) + in_eager(self.up, x)
        return first + self.up(x)


@torch._dynamo.disable
def in_eager(up: nn.Linear, x: Tensor) -> Tensor:
    return up(x)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("eager_too", [False, True])
def test_every_use_counts_once(eager_too, overwrite):
    model = with_main_grads(Broken(eager_too))
    model.up.weight.overwrite_main_grad = overwrite
    run = compiled(model)
    uses = 3 if eager_too else 2
    for step in (1, 2):
        x = torch.ones(4, IN, dtype=BF16)
        run(x).sum().backward()
        assert torch.equal(model.up.weight.main_grad, torch.full((OUT, IN), 4.0 * uses * (1 if overwrite else step)))
        assert not model.up.weight.grad.any()


def test_a_gradient_that_stood_in_grad_before_is_left_there():
    linear = dense()
    linear.weight.grad = torch.ones_like(linear.weight)
    backward(compiled(linear)(ones()))
    assert torch.equal(linear.weight.main_grad, WGRAD)
    assert torch.equal(linear.weight.grad, torch.ones_like(linear.weight))


def test_a_tied_weight_is_summed_before_it_is_added():
    linear = with_main_grads(nn.Linear(IN, IN, bias=False, dtype=BF16))

    def twice(x: Tensor) -> Tensor:
        return linear(x) + linear(2 * x)

    backward(compiled(twice)(ones()))
    assert torch.equal(linear.weight.main_grad, 3 * WGRAD[:IN])


@pytest.mark.parametrize("ask", ["input alone", "frozen", "no_grad"])
def test_what_is_not_asked_for_is_left_alone(ask):
    linear = dense()
    run = compiled(linear)
    x = ones().requires_grad_()
    if ask == "frozen":
        linear.weight.requires_grad_(False)
        backward(run(x))
    elif ask == "no_grad":
        with torch.no_grad():
            run(x)
    else:
        torch.autograd.grad(run(x).sum(), x)
    assert not linear.weight.main_grad.any()
    assert linear.weight.grad is None and linear.weight.grad_added_to_main_grad is False


def test_interleaved_microbatches_and_a_main_grad_replaced_between():
    linear = dense()
    run = compiled(linear)
    first, second = run(ones()), run(ones())
    backward(first)
    backward(second)
    assert torch.equal(linear.weight.main_grad, 2 * WGRAD)
    linear.weight.main_grad = torch.zeros(OUT, IN)
    backward(run(ones()))
    assert torch.equal(linear.weight.main_grad, WGRAD)


@pytest.mark.parametrize("change", ["dtype", "none"])
def test_a_main_grad_of_another_kind_is_refused(change):
    linear = dense()
    run = compiled(linear)
    backward(run(ones()))
    linear.weight.main_grad = None if change == "none" else torch.zeros(OUT, IN, dtype=BF16)
    with pytest.raises(RuntimeError, match=r"weight .*: compiled with accumulate_into_main_grad for a main_grad of"):
        run(ones())


def test_a_main_grad_of_another_shape_is_refused():
    linear = dense()
    linear.weight.main_grad = torch.zeros(OUT * IN)
    with pytest.raises(Exception, match=r"weight: its main_grad has shape \(128,\)"):
        compiled(linear)(ones())


class Block(nn.Module):
    """What it computes is its input. (Dynamo does not look into a lone nn.Linear that is compiled by itself.)"""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, IN, bias=False, dtype=BF16)
        nn.init.eye_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def test_equal_layers_share_a_graph_and_keep_their_gradients_apart():
    model = with_main_grads(nn.Sequential(*[Block() for _ in range(3)]))
    for layer in model:
        layer.compile(backend="gtp", options={"inner": "eager", "accumulate_into_main_grad": True})
    x = ones()
    backward(model(x))
    for layer in model:
        assert torch.equal(layer.up.weight.main_grad, WGRAD[:IN])


class Experts(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.experts = GroupedLinear(3, IN, OUT, bias=False, dtype=BF16)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self.experts, x, splits, use_reentrant=False)
        return self.experts(x, splits)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_grouped_experts(checkpointed):
    model = with_main_grads(Experts(checkpointed))
    backward(compiled(model)(ones(), torch.tensor([4, 0, 0])))
    assert torch.equal(model.experts.weight0.main_grad, WGRAD)
    assert not model.experts.weight1.main_grad.any() and model.experts.weight1.grad_added_to_main_grad is True


def test_autocast_keeps_the_gemms_float32():
    linear = with_main_grads(nn.Linear(IN, OUT, bias=False))
    run = compiled(linear)
    with torch.autocast("cpu", BF16):
        y = run(ones().float())
    backward(y)
    assert torch.equal(linear.weight.main_grad, WGRAD)


def test_explain_names_them():
    model = with_main_grads(nn.Sequential(nn.Linear(IN, OUT, bias=False, dtype=BF16)))
    (row,) = gtp_compile.explain(model, options={"accumulate_into_main_grad": True})(ones()).groups
    assert (row.leader, row.gemm_dtype, row.main_grad_dtype, row.matched) == ("0.weight", "float32", "float32", True)
    assert row.wire_dtype is None
