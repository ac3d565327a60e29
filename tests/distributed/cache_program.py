"""One process of `test_caches.py`: compile what is asked, and say what the caches did and what went over the wire.

    python cache_program.py '[{"world": 2}, {"world": 2, "options": {"disable": ["retype_wgrads"]}}]'

The process groups are fake, so one process is enough for a mesh of any size. Prints one JSON line for each request.
"""

import json
import sys
from typing import Any

import torch
from dist_helpers import reductions, spy
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import Shard

import gtp_compile
from gtp_compile.testing import fake_mesh


class Block(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        self.up = nn.Linear(16, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(x))


def compile_and_train(request: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    with fake_mesh(request.get("world", 2)) as mesh:
        model = Block(request.get("out", 32)).to(torch.bfloat16)
        if request.get("sharded", True):
            gtp_compile.shard(
                model,
                mesh,
                shard_fn=lambda fqn, module, param: Shard(0),
                main_grad_dtype=getattr(torch, request.get("main_grad", "float32")),
                reduce_op=request.get("reduce_op", "avg"),
            )
        step = torch.compile(model, backend=request.get("backend", "gtp"), options=request.get("options"))
        with spy() as seen:
            step(torch.ones(8, 16, dtype=torch.bfloat16)).sum().backward()
    counted = {kind: counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("hit", "miss", "bypass")}
    wire = [[str(c.dtype).removeprefix("torch."), c.numel] for c in reductions(seen)]
    return {**counted, "wire": wire, "package": gtp_compile.__file__}


if __name__ == "__main__":
    for request in json.loads(sys.argv[1]):
        print(json.dumps(compile_and_train(request)), flush=True)
