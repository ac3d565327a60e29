"""The ways in which people write experts and dense weights, on two ranks. All layers of a row cost one compilation.

Where each form is tested: on several ranks against float64, with `verify` and the form's name. The graph tests of the
GEMMs are those of `tests/passes/wgrad_forms.py`.

    grouped_mm, [E, N, K] and [E, K, N], bias       here: grouped, grouped_in_out, interleaved
    N discrete weights, stacked; plain followers    here: discrete, leader_only; our GroupedLinear: test_truth_table.py,
                                                    test_tokens.py, test_ops_grouped_linear_distributed_weight.py
    loop over split(counts), a list or tolist()     here: loop_list, loop_tolist, and the same with mm
    loop over hit experts                           test_eager_loops.py
    batched_mm, a weight picked for each row        test_batched_experts.py: picked...
    capacity factor, bmm and einsum                 test_batched_experts.py: bmm..., einsum..., matmul_groups
    gate and up: chunked, interleaved, separate     here: chunked, sliced, interleaved, separate
    Hugging Face's grouped_mm_fallback              test_fallback_form.py, test_hf_families.py
    linear, addmm, Conv1D, embedding, tied          here: linear, conv1d, scaled_addmm, embedding, tied
    a weight used several times                     here: heads, tied; test_microbatches.py: one_reduction_per_weight
    adapters beside frozen weights, or merged       test_adapters.py, test_peft.py; here: merged_adapter, merged_stack
    an operand more: scale, routing weight, adapter test_operands.py
    what no pass knows                              test_refusals.py, test_retype_wgrads.py: no_operand_is_ignored
    autocast, fp16 with a scaler                    test_both_forms.py, test_graph_edges.py: autocast
    selective checkpointing, pipeline order         test_microbatches.py
    a graph break inside the experts                test_graph_breaks.py
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dist_helpers import BF16, FP16, FP32
from layer_forms import Layer, grouped, train
from ranks import run_ranks
from torch import Tensor

E, N, K, V = 3, 16, 8, 11
UP, OUT_IN, IN_OUT = (E, 2 * N, K), (E, N, K), (E, K, N)


def layer(name: str, form: str, weight: tuple[int, ...], compute: Any, **more: Any) -> Layer:
    """A layer of `weight`, of a `bias` where given, and of `others`, each of the same form."""
    others, bias = more.pop("others", {}), more.pop("bias", ())
    weights = {"weight": weight, **({"bias": bias} if bias else {}), **others}
    forms = {n: form for n in weights if n != "bias" and not n.startswith("follower")}
    return Layer(name, weights, forms, more.pop("x", ("R", K)), compute, (0, V), **more)


def stacked(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """Discrete weights `[N, K]` as one `[E, N, K]`."""
    return torch.stack([weight.to(x.dtype) for weight in w.values()])


def split_by(at: dict[str, Any], x: Tensor, how: str) -> Any:
    return x.split(at["splits"] if how == "list" else at["counts"].tolist())


def loop(w: dict[str, Tensor], x: Tensor, at: dict[str, Any], how: str) -> Tensor:
    rows = split_by(at, x, how)
    return torch.cat([F.linear(r, w["weight"][e], w["bias"][e]) for e, r in enumerate(rows)])


def loop_mm(w: dict[str, Tensor], x: Tensor, at: dict[str, Any], how: str) -> Tensor:
    return torch.cat([torch.mm(r, m) for r, m in zip(split_by(at, x, how), w["weight"].unbind(0), strict=True)])


def chunked(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    gate, up = grouped(x, w["weight"].mT, at).chunk(2, dim=-1)
    return grouped(F.silu(gate) * up, w["down"].mT, at)


def interleaved(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    y = grouped(x, w["weight"], at) + w["bias"].repeat_interleave(at["counts"], 0, output_size=x.shape[0])
    gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def separate(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    return F.silu(grouped(x, w["weight"].mT, at)) * grouped(x, w["w3"].mT, at)


def sliced(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    gate, up = w["weight"].chunk(2, dim=1)
    return grouped(x, gate.mT, at) - grouped(x, up.mT, at)


def tied(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    return F.linear(F.embedding(at["ids"], w["weight"]), w["weight"])


def heads(w: dict[str, Tensor], x: Tensor, at: dict[str, Any]) -> Tensor:
    """One output layer for several predictions; the factors are exact in any dtype."""
    return torch.stack([F.linear(x.roll(i, 0) * 2**i, w["weight"]) for i in range(3)])


DENSE = (
    layer("linear", "mm", (N, K), lambda w, x, at: F.linear(x, w["weight"], w["bias"]), bias=(N,)),
    layer("conv1d", "mm", (K, N), lambda w, x, at: torch.addmm(w["bias"], x, w["weight"]), bias=(N,)),
    layer(
        "scaled_addmm", "mm", (K, N), bias=(N,),
        compute=lambda w, x, at: torch.addmm(w["bias"], x, w["weight"], beta=0.5, alpha=2.0),
    ),
    layer("einsum", "bmm", (N, K), lambda w, x, at: torch.einsum("rk,nk->rn", x, w["weight"])),
    layer("embedding", "scatter", (V, K), lambda w, x, at: F.embedding(at["ids"], w["weight"])),
    layer("tied", "mm + scatter", (V, K), tied, is_rounded=True),
    layer("heads", "mm", (V, K), heads),
    layer(
        "merged_adapter", "mm", (N, K), lambda w, x, at: F.linear(x, w["weight"] + w["up"] @ w["down"]),
        others={"up": (N, 2), "down": (2, K)}, is_rounded=True,
    ),
    layer("loop_tolist", "mm", OUT_IN, lambda w, x, at: loop(w, x, at, "tolist"), bias=(E, N)),
    layer("loop_tolist_mm", "mm", IN_OUT, lambda w, x, at: loop_mm(w, x, at, "tolist")),
)  # fmt: skip
LOOPS = (
    layer("loop_list", "mm", OUT_IN, lambda w, x, at: loop(w, x, at, "list"), bias=(E, N)),
    layer("loop_list_mm", "mm", IN_OUT, lambda w, x, at: loop_mm(w, x, at, "list")),
)
GROUPED = (
    layer("grouped", "grouped_mm", OUT_IN, lambda w, x, at: grouped(x, w["weight"].mT, at)),
    layer("grouped_in_out", "grouped_mm", IN_OUT, lambda w, x, at: grouped(x, w["weight"], at)),
    layer(
        "grouped_scaled_rows", "grouped_mm", IN_OUT, lambda w, x, at: grouped(x * 0.5, w["weight"], at) * x[:, :1],
        is_rounded=True,
    ),
    layer("chunked", "grouped_mm", UP, chunked, others={"down": (E, K, N)}, is_rounded=True),
    layer("interleaved", "grouped_mm", (E, K, 2 * N), interleaved, bias=(E, 2 * N), is_rounded=True),
    layer("separate", "grouped_mm", OUT_IN, separate, others={"w3": OUT_IN}, is_rounded=True),
    layer("sliced", "grouped_mm", UP, sliced),
    Layer(
        "merged_stack", {"weight": OUT_IN, "up": (E, N, 2), "down": (E, 2, K)},
        {"weight": "grouped_mm", "up": "bmm", "down": "bmm"}, ("R", K),
        lambda w, x, at: grouped(x, (w["weight"] + w["up"] @ w["down"]).mT, at), (0, V), is_rounded=True,
    ),
    layer(
        "discrete", "grouped_mm", (N, K), lambda w, x, at: grouped(x, stacked(w, x).mT, at),
        others={"weight1": (N, K), "weight2": (N, K)},
    ),
    layer(
        "leader_only", "grouped_mm", (N, K), lambda w, x, at: grouped(x, stacked(w, x).mT, at),
        others={"follower1": (N, K), "follower2": (N, K)},
    ),
)  # fmt: skip
GROUPS = {"dense": DENSE, "loops": LOOPS, "grouped": GROUPED}


def sizes(*splits: int) -> dict[str, Any]:
    return {"splits": list(splits), "R": sum(splits), "S": sum(splits)}


# step, rank: an expert without rows, one row, all rows in one expert
COUNTS = [
    [sizes(5, 0, 9), sizes(5, 0, 9)],
    [sizes(2, 1, 4), sizes(0, 20, 0)],
    [sizes(1, 6, 3), sizes(3, 3, 3)],
]


def train_layers(rank: int, group: str, dtype: torch.dtype) -> tuple[int, dict[str, tuple[str, bool, float]]]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        return train(rank, GROUPS[group], "eager", COUNTS, dtype)


# A list of counts is part of Dynamo's guards, so other zeros and ones in it compile anew, whatever the backend.
@pytest.mark.parametrize(
    ("group", "dtype", "graphs"),
    [
        pytest.param("dense", BF16, 2, id="dense-bf16"),
        # Random blocks have them, too.
        pytest.param("dense", FP16, 2, id="dense-fp16", marks=pytest.mark.long),
        pytest.param("dense", FP32, 2, id="dense-fp32", marks=pytest.mark.long),
        pytest.param("loops", BF16, 6, id="loops"),
        pytest.param("grouped", BF16, 2, id="grouped"),
    ],
)
def test_every_layer_is_exact_and_says_its_form(group, dtype, graphs, subtests):
    for compiled_graphs, rows in run_ranks(train_layers, 2, group, dtype):
        assert compiled_graphs <= graphs
        for of in GROUPS[group]:
            for name, form in of.forms.items():
                with subtests.test(f"{of.name}.{name}"):
                    found, matched, error = rows[f"units.{of.name}.{name}"]
                    assert (found, matched) == (form, True)
                    assert error <= 1e-6
