"""What people do to any module, on a sharded one: move, copy, save, initialise, freeze, hook, parametrize."""

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import BF16, FP32, close_main_grad, compiled, expect, reductions, spy, whole, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from uneven import along_out, expect_equal, expect_sound, expect_trains, loss, message, rows, start, whole_values

import gtp_compile
from gtp_compile.backend import gtp

WORLD = 2


# Copies.


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "torch_save": saved_and_loaded}


def copied(rank: int, how: str) -> None:
    model, twin = start((WORLD,))
    step = compiled(model)
    loss(step(*rows(rank, 1))).backward()
    for _, param in model.named_parameters():
        param.requires_grad_(param is not model.few.weight)
    other = COPIES[how](model)
    expect("one class", type(other.wide) is type(model.wide), True)
    expect_sound(other)
    expect_equal("values", whole_values(other), whole_values(model))
    for name, param in other.named_parameters():
        mine = model.get_parameter(name)
        expect(
            f"{name}: memory of its own", param.leaf.data_ptr() != mine.leaf.data_ptr() or not param.leaf.numel(), True
        )
        # A file holds no gradients, as for any parameter.
        kept = mine.main_grad if how == "deepcopy" else torch.zeros_like(mine.main_grad)
        expect(f"{name}: main_grad", torch.equal(param.main_grad, kept), True)
        expect(f"{name}: requires_grad", param.requires_grad, name != "few.weight")
    other.few.weight.requires_grad_()
    before = {n: p.main_grad.clone() for n, p in model.named_parameters()}
    expect_trains(other, twin, rank)
    for name, param in model.named_parameters():
        expect(f"{name}: main_grad of the original", torch.equal(param.main_grad, before[name]), True)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    expect("values of the original", bool(model.wide.weight.full_tensor().any()), True)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.works(
    "`copy.deepcopy(model)`, `torch.save(model)` and load",
    "a sharded model with memory of its own; a copy keeps gradients, a file doesn't",
)
def test_a_copy_is_a_model_of_its_own(how):
    run_ranks(copied, WORLD, how)


def copied_with_grad(rank: int) -> None:
    """`.grad` of a copy is over the copy's main_grad, as in the original."""
    model, _ = start((WORLD,))
    loss(model(*rows(rank))).backward()
    other = copy.deepcopy(model)
    for name, param in other.named_parameters():
        expect(f"{name}: over main_grad", param.grad._local_tensor.data_ptr(), param.main_grad.data_ptr())
        expect(
            f"{name}: values", torch.equal(whole(param, param.grad), whole(param, model.get_parameter(name).grad)), True
        )
    for m in (model, other):
        loss(m(*rows(rank))).backward()
    for name, param in other.named_parameters():
        expect(f"{name}: goes on", torch.equal(param.main_grad, model.get_parameter(name).main_grad), True)


def test_a_copy_goes_on_accumulating():
    run_ranks(copied_with_grad, WORLD)


def renewed_behind_zero_grad(rank: int) -> None:
    """zero_grad, then a copy or a move, then a step: what was in main_grad before counts no more."""
    model, twin = start((WORLD,))
    loss(model(*rows(rank, 1))).backward()
    for act in (copy.deepcopy, lambda m: m._apply(lambda t: t.clone())):
        model.zero_grad()
        model = act(model)
        expect_trains(model, twin, rank)
    grads = [whole(p, p.grad) for p in model.parameters()]
    model._apply(lambda t: t.clone())  # `.grad` moves along
    for param, grad in zip(model.parameters(), grads, strict=True):
        expect(f"{param.leaf.fqn}: .grad", torch.equal(whole(param, param.grad), grad), True)
        expect(f"{param.leaf.fqn}: over main_grad", param.grad._local_tensor.data_ptr(), param.main_grad.data_ptr())
    model.wide.weight.grad = torch.ones_like(model.wide.weight)
    expect("a user's .grad", bool((copy.deepcopy(model).wide.weight.grad._local_tensor == 1).all()), True)


def test_zero_grad_counts_for_copies_and_moves():
    run_ranks(renewed_behind_zero_grad, WORLD)


def data_attribute(rank: int) -> list[str]:
    model, _ = start((WORLD,))
    param, full = model.wide.weight, torch.randn(13, 16)
    address = param.leaf.data_ptr()
    param.data.copy_(full)
    expect("copied", torch.equal(param.full_tensor(), full), True)
    param.data = full + 1
    expect("assigned", torch.equal(param.full_tensor(), full + 1), True)
    param.data = param.data * 2  # a DTensor
    expect("assigned a DTensor", torch.equal(param.full_tensor(), (full + 1) * 2), True)
    param.data.mul_(0.5)
    expect("in place", torch.equal(param.full_tensor(), full + 1), True)
    buffer = io.BytesIO()
    torch.save({"copy": copy.deepcopy(param.data), "values": param.data}, buffer)
    buffer.seek(0)
    for name, value in torch.load(buffer, weights_only=False).items():
        expect(f"{name}: kept elsewhere", (type(value), torch.equal(value.full_tensor(), full + 1)), (DTensor, True))
    expect("one memory, all along", (param.leaf.data_ptr(), param._local_tensor.data_ptr()), (address, address))
    flat = torch.arange(float(sum(p.numel() for p in model.parameters())))
    nn.utils.vector_to_parameters(flat, model.parameters())
    expect(
        "vector_to_parameters",
        torch.equal(torch.cat([p.full_tensor().flatten() for p in model.parameters()]), flat),
        True,
    )

    def assign(value: Tensor) -> None:
        param.data = value

    return [message(ValueError, lambda: assign(full[:7])), message(TypeError, lambda: assign(full.to(BF16)))]


@pytest.mark.works("`p.data`, `p.data = values`", "the shard's memory; takes DTensors and whole tensors")
def test_data_is_the_shards_memory():
    for told in run_ranks(data_attribute, WORLD):
        assert told == [
            "wide.weight: values of shape (13, 16) expected, got (7, 16)",
            "wide.weight: values of dtype torch.float32 expected, got torch.bfloat16",
        ]


# Moves.


def moved(rank: int) -> list[str]:
    model, twin = start((WORLD,))
    before = whole_values(model)
    held = list(model.parameters())
    addresses = [p.leaf.data_ptr() for p in held]
    for move in (
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.float(),
        lambda m: m.to(FP32),
        lambda m: m.eval().train(),
    ):
        expect("returns the model", move(model) is model, True)
    expect("nothing moved", [p.leaf.data_ptr() for p in model.parameters()], addresses)
    told = [
        message(TypeError, lambda: model.half()),
        message(TypeError, lambda: model.to(BF16)),
        message(TypeError, lambda: model.wide.double()),
    ]
    expect_equal("values", whole_values(model), before)
    model._apply(lambda t: t.clone())  # what moving to another device comes down to
    pairs = zip(held, model.parameters(), strict=True)
    expect("other memory", any(a.leaf.data_ptr() == b.leaf.data_ptr() for a, b in pairs if len(a.leaf)), False)
    expect_sound(model)
    expect_equal("moved values", whole_values(model), before)
    expect_trains(model, twin, rank)
    return told


@pytest.mark.works(
    "`.to(device)`, `.half()`, `.to(dtype)`",
    "moves; a dtype other than the shards' (the optimizer's masters) is refused",
)
def test_moves_keep_the_pair_together_and_casts_are_refused():
    for told in run_ranks(moved, WORLD):
        for text, dtype in zip(told, ("float16", "bfloat16", "float64"), strict=True):
            assert text == (
                "wide.weight: its shard is torch.float32, and stays so (it is what the optimizer trains); to compute "
                f"in torch.{dtype}, give it to gtp_compile.shard as param_dtype, or convert the model before"
            )


def tied(rank: int) -> None:
    """A weight of two modules stays one weight."""
    model = nn.ModuleDict({"a": nn.Linear(16, 13), "b": nn.Linear(16, 13)})
    model["b"].weight = model["a"].weight
    gtp_compile.shard(model, world_mesh(), shard_fn=along_out)
    for act in (lambda m: m._apply(lambda t: t.clone()), copy.deepcopy, saved_and_loaded):
        model = act(model)
        expect("tied", model["a"].weight is model["b"].weight, True)
        expect("one leaf", model["a"]._gtp_leaves["weight"] is model["b"]._gtp_leaves["weight"], True)


@pytest.mark.works("tied weights, moved, copied, saved", "one weight still")
def test_tied_weights_stay_tied():
    run_ranks(tied, WORLD)


# Names, frozen parameters, hooks.


def named(rank: int) -> None:
    model, twin = start((WORLD,))
    expect("named_parameters", [n for n, _ in model.named_parameters()], list(twin.masters))
    expect("state_dict", list(model.state_dict()), list(twin.masters))
    expect("get_parameter", model.get_parameter("few.weight") is model.few.weight, True)
    expect("numel", sum(p.numel() for p in model.parameters()), sum(p.numel() for p in twin.masters.values()))
    expect("dir and repr", "weight" in dir(model.few) and "DTensor" in repr(model.few.weight), True)
    expect("attributes are DTensors", isinstance(model.few.weight, DTensor) and model.few.weight.shape == (5, 13), True)


@pytest.mark.works(
    "`named_parameters`, `get_parameter`, `dir`, `repr`", "names as before, DTensors of the global shape"
)
def test_names():
    run_ranks(named, WORLD)


class Backends:
    """The backend, and how often Dynamo called it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        self.calls += 1
        return gtp(gm, example_inputs, options={"inner": "eager"})


def frozen(rank: int) -> None:
    model, twin = start((WORLD,))
    backend = Backends()
    step = torch.compile(model, backend=backend)

    def train(names: set[str], compilations: int) -> None:
        model.zero_grad()
        before = {n: p.main_grad.clone() for n, p in model.named_parameters()}
        for _ in range(2):
            with spy() as seen:
                y = step(*rows(rank))
                if names:
                    loss(y).backward()
        expect("compilations", backend.calls, compilations)
        expect("reductions", len(reductions(seen)), len({n.rstrip("012") for n in names}))
        want = twin.gradients(rows(rank)[0])
        for name, param in model.named_parameters():
            if name in names:
                close_main_grad(param, 2 * want[name])
            else:
                expect(f"{name}: untouched", torch.equal(param.main_grad, before[name]), True)

    everything = set(twin.masters)
    train(everything, 1)
    model.few.weight.requires_grad_(False)
    expect("the leaf follows", model.few.weight.leaf.requires_grad, False)
    train(everything - {"few.weight"}, 2)
    model.few.weight.requires_grad_(True)
    train(everything, 2)  # the first graph again
    model.requires_grad_(False)
    train(set(), 3)
    model.requires_grad_(True)
    train(everything, 3)
    model.experts.weight1.requires_grad = False
    train(everything - {"experts.weight1"}, 4)


@pytest.mark.works("`requires_grad_(False)` and back", "no wgrad and no collective while off; one recompilation")
def test_requires_grad_off_and_on():
    run_ranks(frozen, WORLD)


def hooked(rank: int, shape: tuple[int, ...]) -> None:
    """Users' hooks fire once a backward, after main_grad is final; removed ones don't."""
    model, twin = start(shape)
    fired: list[tuple[str, Tensor]] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p, n=n: fired.append((n, p.main_grad.clone())))
        for n, p in model.named_parameters()
    ]
    for run in (compiled(model), model):
        fired.clear()
        loss(run(*rows(rank))).backward()
        expect("fired", sorted(n for n, _ in fired), sorted(twin.masters))
        for name, seen in fired:
            expect(f"{name}: final", torch.equal(seen, model.get_parameter(name).main_grad), True)
    fired.clear()
    for handle in handles:
        handle.remove()
    loss(model(*rows(rank))).backward()
    expect("fired after removal", fired, [])


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("`register_post_accumulate_grad_hook`", "fires once a backward, when main_grad is final")
def test_hooks_fire_once_when_main_grad_is_final(shape):
    run_ranks(hooked, 4, shape)


class Locked(nn.Linear):
    """Holds what can't be copied, and says so."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "lock"}


def odd_things(rank: int) -> list[str]:
    """What people do to classes and attributes of modules."""
    model = nn.ModuleDict({"a": nn.Linear(16, 13), "b": Locked(16, 13), "norm": nn.BatchNorm1d(4)})
    model["a"].weight._no_weight_decay = True
    fired: list[torch.Size] = []
    model["a"].weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.shape))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    model["b"].weight.grad = torch.ones(13, 16)
    told.append(message(ValueError, lambda: gtp_compile.shard(model, world_mesh(), shard_fn=along_out)))
    model.zero_grad()
    place = lambda f, m, p: along_out(f, m, p) if f[0] in "ab" else None  # noqa: E731
    gtp_compile.shard(model, world_mesh(), shard_fn=place)
    expect("attribute", model["a"].weight._no_weight_decay, True)
    expect("and after a move", model._apply(lambda t: t.clone())["a"].weight._no_weight_decay, True)
    model["a"](torch.ones(2, 16)).sum().backward()
    expect("hook", fired, [torch.Size([13, 16])])
    told.append(message(RuntimeError, early.step))
    fresh = type(model["a"])(4, 6)
    expect("a new one of its class is plain", (type(fresh), fresh.weight.shape), (nn.Linear, (6, 4)))
    expect("copied without its lock", hasattr(copy.deepcopy(model["b"]), "lock"), False)
    told.append(message(TypeError, lambda: model.half()))
    expect("nothing was converted", model["norm"].weight.dtype, FP32)
    told.append(message(AttributeError, lambda: delattr(model["a"], "bias")))
    expect("still there", model["a"].bias.shape, (13,))

    def tie() -> None:
        model["b"].weight = model["a"].weight

    told.append(message(ValueError, tie))
    return told


def test_classes_attributes_and_ties():
    for told in run_ranks(odd_things, WORLD):
        assert told[0] == "b.weight: has a gradient, which would be lost; call zero_grad() before gtp_compile.shard"
        assert told[1].startswith("a.weight: SGD holds the parameter that gtp_compile.shard replaced")
        assert "its shard is torch.float32, and stays so" in told[2]
        assert told[3].startswith("a.bias: is a sharded parameter, and can't be taken out of its module")
        assert told[4].startswith("b.weight: can't become a.weight, another sharded parameter; tie weights before")


# Beside others.


class Mixed(nn.Module):
    """A sharded layer between two plain ones that other tools take over."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.ours, self.behind = nn.Linear(16, 16), nn.Linear(16, 13), nn.Linear(13, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(torch.relu(self.ours(self.before(x))))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


def parametrized(rank: int) -> None:
    torch.manual_seed(1)
    model, other = Mixed(), Mixed()
    other.load_state_dict(model.state_dict())
    for m in (model, other):
        parametrize.register_parametrization(m.before, "weight", Symmetric())
        weight_norm(m.behind)
    place = lambda f, m, p: Shard(0) if f == "ours.weight" else None  # noqa: E731
    gtp_compile.shard(model, world_mesh(), shard_fn=place)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank))
    step = compiled(model)
    loss(step(x)).backward()
    loss(other(x)).backward()
    for (name, param), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if name == "ours.weight":
            mean = theirs.grad.clone()
            dist.all_reduce(mean)
            close_main_grad(param, mean / WORLD, 1e-5)
        else:
            expect(name, torch.allclose(param.grad, theirs.grad, atol=1e-6), True)


@pytest.mark.works("`parametrize`, `weight_norm` on other modules", "work as ever")
def test_parametrizations_of_other_modules():
    run_ranks(parametrized, WORLD)


def refused(rank: int) -> list[str]:
    model, _ = start((WORLD,))
    full = whole_values(model)
    step = compiled(model)

    def call(m: nn.Module, prefix: str = "") -> Any:
        return torch.func.functional_call(m, {prefix + n: p for n, p in full.items()}, rows(rank))

    before = step(*rows(rank))
    told = [message(RuntimeError, lambda: call(model)), message(RuntimeError, lambda: call(step, "_orig_mod."))]
    expect("the model is as it was", torch.equal(step(*rows(rank)), before), True)
    own = dict(model.named_parameters())
    expect("its own parameters are fine", torch.equal(torch.func.functional_call(model, own, rows(rank)), before), True)
    outer = nn.Sequential(model)
    told.append(message(ValueError, lambda: gtp_compile.shard(outer, world_mesh())))
    return told


@pytest.mark.works("`torch.func.functional_call` with other tensors; `shard` of a sharded model", "refused")
def test_functional_call_and_shard_of_a_shard_are_refused():
    for told in run_ranks(refused, WORLD):
        for text in told[:2]:
            assert text.startswith(
                "wide.weight: another tensor stands in its place (functional_call?), but a sharded weight is gathered "
                "from its own shard; write the values into the parameter instead"
            )
        assert told[2] == "0.wide.weight: is sharded already; call shard once, on the outermost module"


def two_models(rank: int) -> None:
    """Over different meshes, with different dtypes, training in turns."""
    a, twin_a = start((4,))
    b, twin_b = start((2, 2), reduce_op="sum")
    steps = [compiled(a), compiled(b)]
    for i in range(2):
        for model, twin, step, op in ((a, twin_a, steps[0], "avg"), (b, twin_b, steps[1], "sum")):
            model.zero_grad()
            loss(step(*rows(rank, i))).backward()
            want = twin.gradients(rows(rank, i)[0], op)
            for name, param in model.named_parameters():
                close_main_grad(param, want[name])


@pytest.mark.works("two models, meshes, dtypes in one process", "don't touch each other")
def test_two_models_in_one_process():
    run_ranks(two_models, 4)
