"""PEFT's LoRA around a sharded Hugging Face model, on two ranks, beside a plain twin.

PEFT is no part of the `test` extra (`pip install -e ".[peft]"`): `make test` must do without.
"""

import copy
from typing import Any

import pytest
import torch
from dist_helpers import FP32, close, compiled, expect, reduced, reductions, spy, world_mesh
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import gtp_compile

pytest.importorskip("peft")

PROJECTIONS, EXPERTS = ("q_proj", "v_proj"), ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(target_parameters: tuple[str, ...] = (), layers: int = 2) -> nn.Module:
    """A tiny Qwen3-MoE in float32 with random adapters (PEFT's own would start from B = 0, where A has no gradient)."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    lora = LoraConfig(
        r=2, target_modules=list(PROJECTIONS), target_parameters=list(target_parameters), init_lora_weights=False
    )
    return get_peft_model(Qwen3MoeForCausalLM(config), lora)


def batch(rank: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 96, (2, 9 + rank), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def compare(model: nn.Module, twin: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if other.requires_grad:
            close(name, param.grad.full_tensor(), reduced(other.grad), 1e-5)
        else:
            expect(f"{name}: gradient of a frozen weight", param.grad, None)


def projections(rank: int) -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    gtp_compile.shard(model, world_mesh())
    adapters = [p for p in model.parameters() if p.requires_grad]
    expect("adapters", len(adapters), 2 * 2 * len(PROJECTIONS))
    step = compiled(model, strict=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for _ in range(2):
        with spy() as seen:
            step(**batch(rank)).loss.backward()
        expect("sums", [(c.kind, c.dtype) for c in reductions(seen)], [("all_reduce", FP32)] * len(adapters))
        twin(**batch(rank)).loss.backward()
        compare(model, twin)
        for other in twin.parameters():
            other.grad = None if other.grad is None else reduced(other.grad).to(other.dtype)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = gtp_compile.verify(model, options={"inner": "eager"})(**batch(rank))
    expect("GEMM groups", len(found.groups), len(adapters))
    expect("errors of at most 1e-6", max(r.error for r in found.groups) <= 1e-6, True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for row in (*found.groups, *found.others):
        expect(f"{row.leader}: frozen", row.reason.startswith("frozen"), row.leader not in trained)


def test_adapters_of_a_peft_model_train_and_the_frozen_base_costs_no_reduction():
    run_ranks(projections, 2)


def parameters(rank: int) -> str:
    model = adapted(EXPERTS, layers=1)
    twin = copy.deepcopy(model)
    refused = ""
    gtp_compile.shard(sharded_too := copy.deepcopy(model), world_mesh())
    try:
        compiled(sharded_too, fullgraph=False)(**batch(rank))
    except AttributeError as reason:
        refused = str(reason)

    def place(fqn: str, module: nn.Module, param: nn.Parameter) -> Any:
        return None if "experts" in fqn and "lora_" not in fqn else Replicate()

    gtp_compile.shard(model, world_mesh(), shard_fn=place)
    compiled(model, fullgraph=False)(**batch(rank)).loss.backward()
    twin(**batch(rank)).loss.backward()
    compare(model, twin)
    return refused


def test_adapters_of_expert_stacks_need_the_stack_plain():
    """PEFT puts a parametrization on the stack in every forward; a sharded parameter refuses, with the way out."""
    for refused in run_ranks(parameters, 2):
        assert "experts.base_layer.base_layer.down_proj: is a sharded parameter" in refused
        assert "PEFT's target_parameters" in refused
        assert "a shard_fn that returns None for it" in refused
