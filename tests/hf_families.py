"""The model families of transformers that go through its experts interface, each built from a tiny configuration.

A family is a folder of `transformers.models` whose modeling file uses `use_experts_implementation`. `tiny` shrinks the
family's own default configuration: sizes by their names (`SIZES`), lists with one entry per layer to one layer of each
kind, and what else a family needs from `OVERRIDES`.
"""

import functools
import importlib
import inspect
import logging
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dist_helpers import error, reduced, whole, world_mesh
from torch import Tensor, nn

import gtp_compile
from gtp_compile.report import Row, rows_of, split_rows
from gtp_compile.session import Session, watch
from gtp_compile.sharding import leaves_of

VOCAB, LENGTH, BATCH = 96, 16, 2
SHARD_ALL = functools.partial(gtp_compile.shard_large, min_numel=0)  # the models are tiny

LOSS_BOUND = 1e-5
# How far a gradient may be off: what rounding every weight once more does to the twin's, some times over; at least
# LEAST of it, at most MOST of it (and at most MOST * FLOOR of all gradients, where it is zero but for rounding).
SOME, LEAST, MOST, FLOOR = 16.0, 1e-5, 1e-2, 1e-3

# Names that configurations give to sizes, and the tiny value. A name whose default is None, or smaller, keeps it.
SIZES = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "out_hidden_size": 32,
    "output_dim": 32,
    "projector_hidden_size": 32,
    "projection_intermediate_size": 32,
    "hidden_size_per_layer_input": 16,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "encoder_ffn_dim": 48,
    "mlp_dim": 48,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 24,
    "moe_latent_size": 16,
    "moe_shared_expert_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "router_hidden_size": 16,
    "encoder_layers": 1,
    "depth": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_end_index": 1,
    "num_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "swa_v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_kpool": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "block_size": 8,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "max_position_embeddings": 64,
    "model_max_length": 64,
    "hc_mult": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "hc_sinkhorn_iters": 3,
    "gated_norm_rank": 8,
    "d_rel": 8,
    "rel_extent": 16,
    "loop_gate_rank": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "canvas_length": LENGTH,
    "downsample_hidden_size": 16,
    "output_channels": 16,
}
# No noise: both runs must see the same numbers. Token ids must exist.
FIXED = {
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}
_HEADS = {"num_key_value_heads": "num_attention_heads", "swa_num_key_value_heads": "swa_num_attention_heads"}

# What a family's configuration needs on top. "text_config.x" and the like reach into a part.
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_hidden_layers": 2,
                      "text_config.num_experts_per_tok": 2,
                      "vision_config.sam_config.downsample_channels": [16, 32]},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2,
                        "text_config.moe_intermediate_size": 24},
    "dots3_note": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
                   "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                        "mrope_section": [1, 1, 2]}},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    "glm4v_moe": {"text_config.head_dim": 16,
                  "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "hy_v4_vl": {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                 "mrope_section": [2, 1, 1]}},
    "ernie4_5_moe": {"num_hidden_layers": 2},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "mistral4": {"head_dim": 16},
    "mistral_large4": {"text_config.kv_source_layers": None},
    "muse_spark": {"audio_config.hidden_sizes": (8, 8, 8, 8), "audio_config.depths": (1, 1, 1, 1)},
    "qwen4_exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                  "indexer_compress_ratio": 4},
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [16, 32]},
}  # fmt: skip

# What has the weights' dtype in a bf16 model, and is multiplied by its activations.
BF16_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")

# The class to train where it is not the first of these.
_ENTRIES = ("ForCausalLM$", "ThinkerForConditionalGeneration$", "ForConditionalGeneration$", "ForBlockDiffusion$",
            "ForTokenClassification$")  # fmt: skip

# A fixed choice for `make test`: routers, expert layouts and attentions that differ.
IN_MAKE_TEST = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen3_moe")


def families() -> list[str]:
    """Every family on the experts interface, by name."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    files = sorted(models.glob("*/modeling_*.py"))
    return [f.parent.name for f in files if "use_experts_implementation" in f.read_text(encoding="utf-8")]


def entry_class(family: str) -> Any:
    """The model class that is trained."""
    import transformers

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        c
        for c in vars(module).values()
        if inspect.isclass(c) and c.__module__ == module.__name__ and issubclass(c, transformers.PreTrainedModel)
    ]
    for pattern in _ENTRIES:
        for cls in classes:
            if re.search(pattern, cls.__name__):
                return cls
    raise LookupError(f"{family}: no class that can be trained")


def tiny(config_class: Any, overrides: dict[str, Any] | None = None) -> Any:
    """A configuration of `config_class` with a few thousand parameters."""
    default = config_class()
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if hasattr(value, "to_dict"):  # a part: text, vision, audio
            inner = {k.partition(".")[2]: v for k, v in (overrides or {}).items() if k.startswith(f"{name}.")}
            values[name] = tiny(type(value), inner)
        elif name in FIXED and value is not None:
            values[name] = FIXED[name]
        elif name in SIZES and isinstance(value, int) and value > SIZES[name]:
            values[name] = SIZES[name]
    for name, of in _HEADS.items():
        known = vars(default)
        if isinstance(known.get(name), int) and of in values:
            grouped = known[name] < known[of]
            values[name] = min(known[name], values[of] // 2 if grouped else values[of])
    overrides = {k: v for k, v in (overrides or {}).items() if "." not in k}
    known = vars(default) | values | overrides
    dense = known.get("first_k_dense_replace") or known.get("num_dense_layers") or 0
    return config_class(**values | _one_layer_of_each_kind(default, 1 + dense) | overrides)


def _one_layer_of_each_kind(default: Any, least: int) -> dict[str, Any]:
    """Lists with an entry per layer, cut to the first layer of each kind; at least so many layers."""
    count = vars(default).get("num_hidden_layers", 0)
    lists = {k: v for k, v in vars(default).items() if isinstance(v, list | tuple) and len(v) == count}
    lists.pop("kv_source_layers", None)  # numbers of layers
    if not lists:
        return {"num_hidden_layers": least} if count else {}
    kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)]
    chosen = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    chosen += [i for i in range(count) if i not in chosen][: max(0, least - len(chosen))]
    return {name: [v[i] for i in chosen] for name, v in lists.items()} | {"num_hidden_layers": len(chosen)}


def build(family: str, experts: str = "grouped_mm") -> nn.Module:
    """The family's tiny model in float32, with weights that all matter; the same values every time."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    cls = entry_class(family)
    _shorten_chunks(cls.__module__)
    torch.manual_seed(0)
    model: Any = cls(tiny(cls.config_class, OVERRIDES.get(family))).float()
    model.set_experts_implementation(experts)
    if not any(hasattr(m, "_is_expert_parallel") for m in model.modules()):
        raise LookupError(f"{family}: the tiny {cls.__name__} has no experts; give it some in OVERRIDES")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.ndim == 1:
                param.add_(noise * 0.1)
            else:
                param.copy_(noise if "embed" in name else noise * param[0].numel() ** -0.5)
    return model.train()


def _shorten_chunks(module: str) -> None:
    """Linear attention goes through a sequence in chunks of 64, in Python: as many steps, unrolled, in each layer."""
    for fn in vars(importlib.import_module(module)).values():
        if inspect.isfunction(fn) and fn.__module__ == module and fn.__defaults__:
            names = fn.__code__.co_varnames[: fn.__code__.co_argcount][-len(fn.__defaults__) :]
            fn.__defaults__ = tuple(
                LENGTH // 2 if name == "chunk_size" else v for name, v in zip(names, fn.__defaults__, strict=True)
            )


def batch_of(family: str, step: int, rank: int) -> dict[str, Tensor]:
    """The arguments of one training step on one rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(0)} if family == "diffusion_gemma" else {})


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy of the logits and the next token (of any token, where there are but a few classes)."""
    logits = output.logits.float()
    targets = batch["input_ids"].roll(-1, 1) % logits.shape[-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# On the ranks (see `ranks.run_ranks`).


@dataclass(slots=True)
class Outcome:
    """What became of one family.

    Attributes:
        loss, grad: the worst relative errors against the twin, and `where` the gradient's is.
        wrong: the gradients that are further off than rounding explains.
        groups, unmatched: how many GEMM weight groups, and the names and reasons of those that no pass knows.
        stacked: the kinds under which the experts' stacked weights are reported.
        uncaptured: weights with a gradient that are in no compiled graph.
        breaks: the reasons for the graph breaks, each as often as it happened.
        bf16: the worst error of `gtp_compile.verify` with `param_dtype=torch.bfloat16`; None: not run.
        bf16_unmatched: as `unmatched`, in that run.
    """

    loss: float = 0.0
    grad: float = 0.0
    where: str = ""
    wrong: list[str] = field(default_factory=list)
    groups: int = 0
    unmatched: dict[str, str] = field(default_factory=dict)
    stacked: list[str] = field(default_factory=list)
    uncaptured: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    bf16: float | None = None
    bf16_where: str = ""
    bf16_unmatched: dict[str, str] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.loss <= LOSS_BOUND and not self.wrong


def train(rank: int, family: str, experts: str, inner: str, steps: int = 2, bf16: bool = False) -> Outcome:
    """Train the sharded family beside its twin; `inner` as the backend's option, or "none": without a compiler.

    Every rank takes its own batch. The twin is a plain model in eager PyTorch on rank 0, and takes all of them.
    """
    model = build(family, experts)
    twins = [build(family, experts), _rounded(build(family, experts))] if rank == 0 else []
    gtp_compile.shard(model, world_mesh(), shard_fn=SHARD_ALL)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, *twins)]
    run = model if inner == "none" else torch.compile(model, backend="gtp", options={"inner": inner})
    outcome, session = Outcome(), Session(keep_text=False)
    torch._dynamo.utils.counters.clear()
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = batch_of(family, step, rank)
        with watch(session):
            loss = loss_of(run(**batch, use_cache=False), batch)
            loss.backward()
        _compare(outcome, step, model, loss.detach(), twins, [_twin_step(t, family, step) for t in twins])
        for optimizer in optimizers:
            optimizer.step()
    groups, others = split_rows(rows_of(session, leaves_of(model)))
    outcome.groups, outcome.unmatched = len(groups), _unmatched(groups)
    stacked = {p.leaf.fqn for p in model.parameters() if p.ndim == 3}
    outcome.stacked = sorted({row.kind for row in (*groups, *others) if row.leader in stacked})
    for twin in twins[:1]:
        with_grad = {n for n, p in twin.named_parameters() if p.grad is not None}
        outcome.uncaptured = [r.leader for r in others if r.kind == "eager" and r.leader in with_grad]
    outcome.breaks = [r for r, n in torch._dynamo.utils.counters["graph_break"].items() for _ in range(n)]
    if bf16:
        _verify_bf16(outcome, rank, family, experts, inner)
    return outcome


def _twin_step(twin: nn.Module, family: str, step: int) -> Tensor:
    total = torch.zeros(())
    for rank in range(dist.get_world_size()):
        batch = batch_of(family, step, rank)
        loss = loss_of(twin(**batch, use_cache=False), batch) / dist.get_world_size()
        loss.backward()
        total += loss.detach()
    return total


def _rounded(model: nn.Module) -> nn.Module:
    """`model`, with every weight one rounding away."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + torch.randn(param.shape, generator=generator).sign() * 2.0**-24)
    return model


def _compare(
    outcome: Outcome, step: int, model: nn.Module, loss: Tensor, twins: list[nn.Module], losses: list[Tensor]
) -> None:
    """Gather on all ranks, compare on the twins'."""
    mean = reduced(loss)
    grads = {name: whole(p, p.main_grad) for name, p in model.named_parameters() if p.requires_grad}
    if not twins:
        return
    outcome.loss = max(outcome.loss, error(mean, losses[0]))
    twin, rounded = (
        {
            n: torch.zeros_like(p).double() if p.grad is None else p.grad.double()
            for n, p in t.named_parameters()
            if p.requires_grad
        }
        for t in twins
    )
    if set(grads) != set(twin):
        raise AssertionError(f"other parameters than the twin's: {sorted(set(grads) ^ set(twin))}")
    floor = FLOOR * math.sqrt(sum(g.square().sum().item() for g in twin.values()))
    for name, got in grads.items():
        want = twin[name]
        off, norm = (got - want).norm().item(), want.norm().item()
        allowed = SOME * (rounded[name] - want).norm().item() + LEAST * norm
        if not off <= min(allowed, MOST * max(norm, floor)):
            outcome.wrong.append(f"{name} in step {step}: {off / (norm or 1.0):.1e}")
        if not off / max(norm, floor) <= outcome.grad:
            outcome.grad, outcome.where = off / max(norm, floor), f"{name} in step {step}"


def _verify_bf16(outcome: Outcome, rank: int, family: str, experts: str, inner: str) -> None:
    model: Any = build(family, experts)
    in_float32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in BF16_BUFFERS:
            buffer.data = buffer.bfloat16()

    def dtype_of(fqn: str, module: nn.Module, param: nn.Parameter) -> torch.dtype:
        return torch.float32 if any(part in fqn for part in in_float32) else torch.bfloat16

    gtp_compile.shard(model, world_mesh(), shard_fn=SHARD_ALL, param_dtype=dtype_of)
    batch = batch_of(family, 0, rank)
    options = {"inner": inner}
    found = gtp_compile.verify(model, lambda output: loss_of(output, batch), options=options)(**batch, use_cache=False)
    outcome.bf16 = 0.0
    for row in [*found.groups, *found.others]:
        if row.error is not None and not row.error <= outcome.bf16:
            outcome.bf16, outcome.bf16_where = row.error, row.leader
    outcome.bf16_unmatched = _unmatched(found.groups)


def _unmatched(rows: list[Row]) -> dict[str, str]:
    return {r.leader: r.reason for r in rows if not r.matched}


def under_backend_eager(rank: int, family: str, experts: str) -> str:
    """What goes wrong under `torch.compile(model, backend="eager")` without sharding ("" if nothing)."""
    if rank > 0:
        return ""
    model, batch = build(family, experts), batch_of(family, 0, 0)
    want = loss_of(model(**batch, use_cache=False), batch)
    try:
        got = loss_of(torch.compile(model, backend="eager")(**batch, use_cache=False), batch)
        got.backward()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
    off = error(got.detach(), want.detach())
    return "" if off <= LOSS_BOUND else f"the loss is off by {off:.1e}"
