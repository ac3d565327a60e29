"""`unsharded`: plain whole parameters for a while; and forwards without gradients, with it and without."""

import copy
import datetime
import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import BF16, FP32, close_main_grad, compiled, expect, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from uneven import Tied, along_out, expect_equal, expect_sound, loss, message, rows, start

import gtp_compile


def plain_inside(rank: int, shape: tuple[int, ...]) -> None:
    model, twin = start(shape)
    step = compiled(model)
    loss(step(*rows(rank, 1))).backward()
    model.zero_grad()
    with torch.no_grad():
        want = [model(*rows(r)) for r in range(2)]
    params, classes = list(model.parameters()), [type(m) for m in model.modules()]
    for held in (model, step):  # the compiled one stands for the model behind it
        with gtp_compile.unsharded(held) as inside, spy() as seen:
            expect("what it gives", inside is held, True)
            for name, param in model.named_parameters():
                expect(f"{name}: type", type(param), nn.Parameter)
                expect(f"{name}: dtype and shape", (param.dtype, param.shape), (BF16, twin.masters[name].shape))
                expect(f"{name}: values", torch.equal(param, twin.masters[name].to(BF16)), True)
            expect("classes", type(model.wide), nn.Linear)
            expect("state_dict", {type(v) for v in model.state_dict().values()}, {Tensor})
            with torch.no_grad():
                for i in range(2 if rank == 0 else 0):  # each rank does what it wants
                    expect("forward", torch.equal(held(*rows(i)), want[i]), True)
        expect("collectives inside", seen, [])
    expect("parameters behind it", all(a is b for a, b in zip(params, model.parameters(), strict=True)), True)
    expect("classes behind it", [type(m) for m in model.modules()], classes)
    expect_sound(model)
    loss(step(*rows(rank))).backward()
    grads = twin.gradients(rows(rank)[0])
    for name, param in model.named_parameters():
        close_main_grad(param, grads[name])


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("`with gtp.unsharded(model):`", "whole plain parameters on every rank, restored behind it")
def test_inside_it_is_a_plain_model_and_behind_it_as_before(shape):
    run_ranks(plain_inside, 4, shape)


def masters(rank: int) -> None:
    model, twin = start((2,))
    with gtp_compile.unsharded(model, dtype=FP32):
        expect_equal("masters", dict(model.named_parameters()), {n: m.detach() for n, m in twin.masters.items()})
    other, twin = start((2,), param_dtype=None)
    with gtp_compile.unsharded(other):
        expect("own dtype", {p.dtype for p in other.parameters()}, {FP32})


def test_the_masters_can_be_had():
    run_ranks(masters, 2)


def raised(rank: int) -> None:
    model, _ = start((2,))
    told = message(KeyError, lambda: fail_inside(model))
    expect("the user's error", told, "'theirs'")
    expect_sound(model)
    expect("DTensors again", all(isinstance(p, DTensor) for p in model.parameters()), True)


def fail_inside(model: nn.Module) -> None:
    with gtp_compile.unsharded(model):
        raise KeyError("theirs")


def test_it_restores_after_an_error():
    run_ranks(raised, 2)


def add(model: nn.Module) -> None:
    model.few.weight.add_(1)


def write_data(model: nn.Module) -> None:
    model.few.weight.data.mul_(2)


def replace_data(model: nn.Module) -> None:
    model.few.weight.data = torch.zeros_like(model.few.weight)


def swap_rows(model: nn.Module) -> None:
    model.few.weight.data.copy_(model.few.weight.flip(0))


def replace(model: nn.Module) -> None:
    model.few.weight = nn.Parameter(model.few.weight.detach().clone())


def swap_columns(model: nn.Module) -> None:
    model.few.weight.data.copy_(model.few.weight.flip(1))


CHANGES = {
    "columns": swap_columns,
    "add_": add,
    "data": write_data,
    "data=": replace_data,
    "rows": swap_rows,
    "another": replace,
}


def changed(rank: int, how: str) -> str:
    model, twin = start((2,))

    def change() -> None:
        with gtp_compile.unsharded(model), torch.no_grad():
            CHANGES[how](model)

    told = message(RuntimeError, change)
    expect("values", torch.equal(model.few.weight.full_tensor(), twin.masters["few.weight"]), True)
    expect_sound(model)
    return told


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.works("a parameter changed inside it", "refused: the change would be lost")
def test_changes_inside_are_refused(how):
    for told in run_ranks(changed, 2, how):
        assert told == (
            "few.weight: changed inside unsharded(), which is lost; write into the sharded parameters (copy_ takes a "
            "whole tensor)"
        )


def tied(rank: int) -> None:
    model = gtp_compile.shard(Tied(13), world_mesh(), shard_fn=along_out)
    with gtp_compile.unsharded(model):
        expect("tied inside", model.head.weight is model.embedding.weight, True)
    expect("tied behind", model.head.weight is model.embedding.weight, True)


def test_tied_weights_are_tied_inside():
    run_ranks(tied, 2)


# Without it.


def without(rank: int, shape: tuple[int, ...]) -> None:
    """no_grad and inference_mode, compiled and eager, train() and eval(): on all ranks, each with its own rows."""
    model, twin = start(shape)
    want = twin.forward(rows(rank)[0], {n: m.detach().double() for n, m in twin.masters.items()})
    step = compiled(model)
    for mode in (torch.no_grad, torch.inference_mode):
        for run in (model, step, model.eval(), step):
            with mode():
                expect(mode.__name__, torch.equal(run(*rows(rank)), want), True)
    loss(step(*rows(rank))).backward()  # training goes on
    for name, grad in twin.gradients(rows(rank)[0]).items():
        close_main_grad(model.get_parameter(name), grad)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.works("`torch.no_grad()` forward on all ranks", "right, compiled or not")
def test_forwards_without_gradients(shape):
    run_ranks(without, 4, shape)


def alone(rank: int, shape: tuple[int, ...], is_compiled: bool, loaded: bool = False) -> str:
    model, _ = start(shape)
    if loaded:
        file = io.BytesIO()
        torch.save(model, file)
        model = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    run: Any = compiled(model) if is_compiled else model
    with torch.no_grad():
        run(*rows(rank))
    meeting = next(p.leaf.meeting for p in model.parameters() if p.leaf.meeting is not None)
    expect("the default is patient", meeting.timeout, datetime.timedelta(seconds=60))
    told = ""
    if rank == 0:
        meeting.timeout = datetime.timedelta(seconds=2)
        with torch.no_grad():
            told = message(RuntimeError, lambda: run(*rows(rank)))
        meeting.timeout = datetime.timedelta(seconds=60)  # every model of these ranks has it
    dist.barrier()
    with torch.no_grad():
        run(*rows(rank))  # together again
    return told


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.works("`torch.no_grad()` forward on one rank", "refused after a minute, with the ranks that did not come")
def test_evaluation_on_one_rank_is_refused_instead_of_hanging(shape, is_compiled):
    world = 2 if shape == (2,) else 4
    told = run_ranks(alone, world, shape, is_compiled, timeout=60.0)
    assert told[0] == (
        f"wide.weight: a forward without gradients needs all ranks of the sharded model, and rank(s) "
        f"{list(range(1, world))} did not come in 2 s. Call it on every rank; or, to evaluate on one, let all ranks "
        "enter `with gtp_compile.unsharded(model)`, inside which each can do what it wants"
    )


def part_alone(rank: int) -> str:
    """A part of the model, without its first weight; twice in one forward they meet once."""
    model, _ = start((2,))
    meeting = model.few.weight.leaf.meeting
    x = torch.randn(3, 13).to(BF16)
    with torch.no_grad():
        count = meeting._count
        model(*rows(rank))
        expect("one meeting a forward", meeting._count, count + 1)
        model.one(model.few(x))
        expect("one a part", meeting._count, count + 3)
        if rank == 0:
            meeting.timeout = datetime.timedelta(seconds=1)
            told = message(RuntimeError, lambda: model.few(x))
            meeting.timeout = datetime.timedelta(seconds=60)
    dist.barrier()
    return told if rank == 0 else ""


def test_a_part_of_the_model_on_one_rank():
    assert run_ranks(part_alone, 2)[0].startswith("few.weight: a forward without gradients needs all ranks")


def test_evaluation_on_one_rank_of_a_model_from_a_file():
    told = run_ranks(alone, 2, (2,), False, True, timeout=60.0)
    assert "rank(s) [1] did not come" in told[0]


# Hugging Face.


def qwen() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=101, hidden_size=32, moe_intermediate_size=24, intermediate_size=32, num_experts=3,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2,
        use_cache=True, experts_implementation="grouped_mm", tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def saved_pretrained(rank: int, folder: str) -> None:
    model = qwen()
    cls = type(model)
    tokens = torch.randint(101, (1, 7), generator=torch.Generator().manual_seed(3))
    want = model(tokens).logits.detach()
    shapes = {n: p.shape for n, p in model.named_parameters()}
    gtp_compile.shard(model, world_mesh())
    with torch.no_grad():
        expect("sharded logits", torch.equal(model(tokens).logits, want), True)
    with gtp_compile.unsharded(model):
        texts = model.generate(tokens, max_new_tokens=3 + 2 * rank, do_sample=False)
        expect("lengths of their own", texts.shape, (1, 10 + 2 * rank))
        if rank == 0:
            model.save_pretrained(folder)
    dist.barrier()
    loaded = cls.from_pretrained(folder, experts_implementation="grouped_mm")
    expect("logits of what was loaded", torch.equal(loaded(tokens).logits, want), True)
    for name, param in loaded.named_parameters():
        expect(f"{name}: never a rank's slice", param.shape, shapes[name])
    expect("the model is sharded again", all(isinstance(p, DTensor) for p in model.parameters()), True)


@pytest.mark.works(
    "`save_pretrained`, `generate` of unequal lengths, inside `unsharded`", "identical logits from the file"
)
def test_hugging_face_round_trip_and_generation(tmp_path):
    run_ranks(saved_pretrained, 2, str(tmp_path / "model"))


def saved_directly(rank: int, folder: str) -> str:
    """Without unsharded(): float32 masters, though bf16 is computed with; written once."""
    model = qwen()
    cls, want = type(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    gtp_compile.shard(model, world_mesh(), param_dtype=BF16)
    expect("still of its class", isinstance(model, cls) and type(model).__name__ == cls.__name__, True)
    copy.deepcopy(model).save_pretrained(f"{folder}/copy")
    model.save_pretrained(f"{folder}/model")
    dist.barrier()
    for name in ("model", "copy"):
        expect("written by one rank", sorted(os.listdir(f"{folder}/{name}"))[0], "config.json")
        expect_equal("values", dict(cls.from_pretrained(f"{folder}/{name}").named_parameters()), want)
    whole_state = {n: p.full_tensor() for n, p in model.state_dict().items()}
    if rank == 0:  # with a state dict of one's own there is nothing to gather
        model.save_pretrained(f"{folder}/mine", state_dict=whole_state)
        expect_equal("values", dict(cls.from_pretrained(f"{folder}/mine").named_parameters()), want)
    dist.barrier()
    meeting = next(p.leaf.meeting for p in model.parameters() if p.leaf.meeting is not None)
    told = ""
    if rank == 0:
        meeting.timeout = datetime.timedelta(seconds=1)
        told = message(RuntimeError, lambda: model.save_pretrained(f"{folder}/alone"))
        meeting.timeout = datetime.timedelta(seconds=60)
    dist.barrier()
    return told


@pytest.mark.works("`save_pretrained` outside it, on all ranks", "the same, with the parameters' own dtype in the file")
def test_save_pretrained(tmp_path):
    told = run_ranks(saved_directly, 2, str(tmp_path))
    assert told[0].startswith(
        "model.embed_tokens.weight: entering unsharded() needs all ranks of the sharded model, and rank(s) [1] did not"
    )
