"""Whole training steps, measured in turns in one process: what the block and model benchmarks share."""

import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Step = Callable[[], object]


def mesh_of_one() -> DeviceMesh:
    """This process alone, as a group over NCCL."""
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29513", "RANK": "0", "WORLD_SIZE": "1"})
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    return init_device_mesh("cuda", (1,))


def hook_main_grads(module: nn.Module) -> nn.Module:
    """Give every parameter a float32 main_grad, to which a hook adds each gradient, as training loops do it."""

    def add(p: nn.Parameter) -> None:
        p.main_grad.add_(p.grad)
        p.grad = None

    for p in module.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.register_post_accumulate_grad_hook(add)
    return module


def race(steps: dict[str, Step], rounds: int = 7, runs: int = 10) -> dict[str, float]:
    """Median over rounds of each candidate's median ms, steps issued back to back; in turns, another order a round."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, shuffle = list(steps), random.Random(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            steps[name]()
            torch.cuda.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
            events[0].record()
            for event in events[1:]:
                steps[name]()
                event.record()
            torch.cuda.synchronize()
            times[name].append(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)))
    return {name: statistics.median(t) for name, t in times.items()}


def peak(step: Step) -> float:
    """GiB that a step takes beyond what is held before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def kernels(step: Step, top: int = 14) -> str:
    """Device time by kernel of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    found = [e for e in profiled.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda e: -e.self_device_time_total)
    lines = [f"{e.self_device_time_total / 1e3:8.3f} ms {e.count:4d} x {e.key[:110]}" for e in found[:top]]
    return "\n".join([f"{sum(e.self_device_time_total for e in found) / 1e3:8.3f} ms in all", *lines])


def gradients(step: Step, module: nn.Module) -> dict[str, torch.Tensor]:
    """What one step adds to each main_grad."""
    for p in module.parameters():
        p.main_grad.zero_()
    step()
    return {name: p.main_grad.detach().double() for name, p in module.named_parameters()}


def check_alike(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float) -> float:
    """The worst relative difference of two steps' gradients.

    Raises:
        AssertionError: One is not finite, or differs by more than `bound`; the numbers would mean nothing.
    """
    worst = 0.0
    for name, reference in want.items():
        difference = ((got[name] - reference).norm() / reference.norm()).item()
        assert difference <= bound, f"{name}: differs by {difference:.1e} from the baseline's, {bound:.0e} is allowed"
        worst = max(worst, difference)
    return worst


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    columns = list(columns)
    for line in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(line) + " |", flush=True)
