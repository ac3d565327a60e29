"""On fake meshes, in one process: `explain` of padded weights on meshes of several dims, and the keys of caches."""

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from uneven import Uneven, along_out, loss, rows

import gtp_compile
from gtp_compile.testing import capture_joint, count_ops, fake_mesh

BF16 = torch.bfloat16

# [members, N, K] of each GEMM group
SHAPES = {
    "wide.weight": (1, 13, 16),
    "few.weight": (1, 5, 13),
    "one.weight": (1, 1, 5),
    "experts.weight0": (3, 7, 16),
    "stacked.weight": (3, 6, 16),
}


@pytest.mark.parametrize("shape", [(8,), (3,), (2, 4), (4, 2), (2, 2, 3)], ids=str)
def test_explain_gives_formulas_with_padding(shape):
    with fake_mesh(torch.Size(shape).numel()):
        model = gtp_compile.shard(Uneven(), init_device_mesh("cpu", shape), shard_fn=along_out, param_dtype=BF16)
        found = gtp_compile.explain(model, loss)(*rows(0))
    *replicas, ranks = shape
    rows_ = {r.leader: r for r in found.groups}
    assert set(rows_) == set(SHAPES)
    for leader, (members, n, k) in SHAPES.items():
        row = rows_[leader]
        assert row.matched and (row.gemm_dtype, row.sum_dtype) == ("float32", "float32")
        padded = 4 * members * k * (n + -n % ranks)
        want = padded * (ranks - 1) // ranks + sum(2 * padded // ranks * (r - 1) // r for r in replicas)
        assert row.wire_bytes == want
        assert "Mod(-N, W)" in row.wire_formula
        names = {"E": members, "N": n, "K": k, "W": ranks, "R": replicas[0] if replicas else 1}
        names |= {f"R{i}": r for i, r in enumerate(replicas)}
        assert sympy.sympify(row.wire_formula, {s: sympy.Symbol(s) for s in names}).subs(names) == want
    assert rows_["wide.weight"].layout == f"Shard(0) over {' x '.join(map(str, [ranks, *replicas]))} ranks, avg"


@pytest.mark.parametrize(("size", "pads"), [(16, 0), (13, 2)], ids=["divisible", "not"])
def test_no_padding_where_none_is_needed(size, pads):
    with fake_mesh(4) as mesh:
        model = gtp_compile.shard(nn.Linear(8, size, bias=False), mesh, shard_fn=along_out, param_dtype=BF16)
        graph = capture_joint(model, torch.randn(6, 8).to(BF16))
        for name in ("group_wgrads", "retype_wgrads", "insert_collectives"):
            graph.run(name)
    ops = count_ops(graph.module.graph)
    # rank 0 holds a full part, so its shard is sent as it is; the gathered weight is cut, the gradient padded
    assert (ops["aten.slice.Tensor"], ops["aten.constant_pad_nd.default"]) == ((1, 1) if pads else (0, 0))


CONFIGURATIONS = {
    "base": ((2,), 8),
    "replicated_over_two": ((2, 2), 8),
    "replicated_over_three": ((3, 2), 8),
    "padded": ((2,), 7),  # rank 0 holds four rows of seven, as of eight
}


def compiled_once(shape: tuple[int, ...], size: int) -> tuple[int, int]:
    """Hits and misses in the cache of whole compilations (it is keyed by the graph with the anchors)."""
    torch._dynamo.reset()
    counters.clear()
    with fake_mesh(torch.Size(shape).numel()):
        layer = nn.Linear(8, size, bias=False)
        gtp_compile.shard(layer, init_device_mesh("cpu", shape), shard_fn=along_out, param_dtype=BF16)
        loss(torch.compile(layer, backend="gtp")(torch.randn(6, 8).to(BF16))).backward()
    return counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]


@pytest.mark.slow
def test_caches_are_keyed_by_groups_and_sizes():
    with fresh_cache():
        for name, configuration in CONFIGURATIONS.items():
            assert compiled_once(*configuration) == (0, 1), name
        for name, configuration in CONFIGURATIONS.items():
            assert compiled_once(*configuration) == (1, 0), name
