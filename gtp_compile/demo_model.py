"""What the demo trains: an untouched Hugging Face Qwen3-MoE, on the text of Python's own documentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LEARNING_RATE", "MAX_NORM", "SHARDED_SIZE", "Batches", "DemoSettings", "Twin", "build_model"]

LEARNING_RATE = 1e-3
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """One run of the demo; the same on every rank.

    Attributes:
        device: "cuda" (one GPU a rank, NCCL) or "cpu" (gloo).
        threads: CPU threads of each rank.
        batch, sequence: windows in a microbatch, and bytes in a window.
    """

    ranks: int
    steps: int
    inner: str
    graphs: str
    device: str
    threads: int
    microbatches: int = 2
    batch: int = 8
    sequence: int = 128
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.ranks * self.microbatches * self.batch * self.sequence


# Hidden size and twice the experts' size are what `shard` splits (out_features), so the number of ranks divides both.
_SIZES = {
    "vocab_size": 256,  # bytes
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}
SHARDED_SIZE = 128


def build_model(seed: int, device: torch.device) -> nn.Module:
    """A Qwen3-MoE of 950,000 float32 parameters; the same values for the same seed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**_SIZES, norm_topk_prob=True, use_cache=False, experts_implementation="grouped_mm")
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model.to(device)


class Batches:
    """Deterministic windows of text, as bytes; other ones for each step, rank and microbatch."""

    def __init__(self, settings: DemoSettings, device: torch.device) -> None:
        from pydoc_data.topics import topics

        self._text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
        self._settings = settings
        self._device = device

    def get(self, step: int, rank: int, microbatch: int) -> dict[str, Any]:
        """The model's arguments; labels are the inputs, the model shifts them itself."""
        s = self._settings
        index = (step * s.ranks + rank) * s.microbatches + microbatch
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + index)
        starts = torch.randint(len(self._text) - s.sequence, (s.batch,), generator=generator)
        windows = torch.stack([self._text[i : i + s.sequence] for i in starts.tolist()])
        ids = windows.to(self._device, torch.long)
        return {"input_ids": ids, "labels": ids}


class Twin:
    """The same training in one process and plain eager PyTorch: nothing of gtp_compile takes part.

    float32 parameters, computed with as bfloat16, on the global batch: each rank's microbatches one after another.
    """

    def __init__(self, settings: DemoSettings, device: torch.device) -> None:
        self._settings = settings
        self._model = build_model(settings.seed, device)
        self._batches = Batches(settings, device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)

    def step(self, step: int) -> float:
        """Train one step, and return the mean loss of the global batch."""
        s = self._settings
        total = 0.0
        self._optimizer.zero_grad()
        for rank in range(s.ranks):
            for microbatch in range(s.microbatches):
                loss = self._loss(self._batches.get(step, rank, microbatch)) / (s.ranks * s.microbatches)
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        return total

    def _loss(self, batch: dict[str, Any]) -> Tensor:
        # The cast is part of the graph, so that gradients arrive at the float32 parameters.
        low = {name: p.to(torch.bfloat16) for name, p in self._model.named_parameters()}
        loss: Tensor = torch.func.functional_call(self._model, low, (), batch).loss
        return loss
