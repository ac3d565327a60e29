"""Hugging Face's Qwen3-MoE, two layers, forward and backward on one GPU: `python benchmarks/hf_moe.py`.

The layers of Qwen3-30B-A3B with random bf16 weights, each compiled by itself, and a vocabulary cut to 6400 so that the
head's share of a step is that of all 48 layers. "inductor" adds each bf16 gradient to a float32 main_grad in a hook;
"gtp" is the same model over a mesh of one rank. Measured in turns in one process; where the gradients disagree there is
no table.
"""

import argparse
from collections.abc import Callable

import torch
import transformers
from shapes import versions
from steps import check_alike, gradients, hook_main_grads, kernels, mesh_of_one, peak, print_table, race
from torch import nn

import gtp_compile

# Rounded to bf16 at other places, through two layers.
BOUND = 3e-2


def build() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=6400,
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=6144,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_hidden_layers=2,
        norm_topk_prob=True,
        use_cache=False,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--profile", action="store_true", help="print device time by kernel, too")
    args = parser.parse_args()
    mesh = mesh_of_one()
    models = {"inductor": hook_main_grads(build()), "gtp": gtp_compile.shard(build(), mesh)}
    for mode, model in models.items():
        for layer in model.model.layers:
            layer.compile(backend=mode)
    ids = torch.randint(6400, (args.batch, args.seq), device="cuda", generator=torch.Generator("cuda").manual_seed(0))

    def step_of(model: nn.Module) -> Callable[[], None]:
        return lambda: model(input_ids=ids, labels=ids).loss.backward()

    steps = {mode: step_of(model) for mode, model in models.items()}
    grads = {mode: gradients(step, models[mode]) for mode, step in steps.items()}
    difference = check_alike(grads["gtp"], grads["inductor"], BOUND)
    del grads
    ms = race(steps)
    gib = {mode: peak(step) for mode, step in steps.items()}
    if args.profile:
        for mode, step in steps.items():
            print(f"\n{mode}\n{kernels(step)}", flush=True)
    print(f"\n{versions()}, transformers {transformers.__version__}; {args.batch} x {args.seq} tokens; ms a step\n")
    rows = [[mode, f"{ms[mode]:.3g}", f"{ms[mode] / ms['inductor']:.3f}", f"{gib[mode]:.2f}"] for mode in steps]
    print_table(["layers compiled by", "ms", "over Inductor", "peak GiB"], rows)
    print(f"\nlargest difference of a main_grad: {difference:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
