"""Eight of the model families of Hugging Face's experts interface; `make sweep` takes all of them.

They differ in router, experts and attention:

    deepseek_v3   sigmoid router with groups and a bias, a shared expert, a dense first layer, latent attention
    gpt_oss       router with bias, interleaved gate and up, transposed [E, K, 2N], a bias per expert, attention sinks
    granitemoe    softmax over the chosen experts only, scaled residuals
    mixtral       the plain case: softmax, [E, 2N, K]
    nemotron_h    experts without a gate, Mamba-2, one part per layer
    olmoe         norms over all heads of queries and keys, router weights not normalised
    phimoe        sparsemixer router, LayerNorm with bias
    qwen3_moe     router weights normalised, norms per head
"""

import pytest
from hf_families import IN_MAKE_TEST, families, train
from ranks import run_ranks

pytest.importorskip("transformers")


def test_the_fixed_choice_is_on_the_experts_interface():
    assert set(IN_MAKE_TEST) <= set(families())


@pytest.mark.parametrize("family", IN_MAKE_TEST)
def test_a_family_trains_as_its_twin(family):
    outcome = run_ranks(train, 2, family, "grouped_mm", "eager", 2)[0]
    assert outcome.loss <= 1e-5 and not outcome.wrong, outcome
    assert not outcome.unmatched and not outcome.uncaptured and not outcome.breaks, outcome
