"""Random mixture-of-experts blocks on two ranks, each beside its twin (see `moe_blocks`).

The same blocks every time, unless the environment asks for others: GTP_BLOCKS of them from GTP_SEED on
(`make blocks BLOCKS=5000 SEED=7`).
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from moe_blocks import Block, blocks, failure

BLOCKS = int(os.environ.get("GTP_BLOCKS", "20"))
SEED = int(os.environ.get("GTP_SEED", "0"))
PARTS = 10  # so that several workers share them


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_block_trains_like_its_twin(part):
    @seeded(SEED * PARTS + part)
    @settings(max_examples=-(-BLOCKS // PARTS), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(block=blocks())
    def holds(block: Block) -> None:
        if wrong := failure(block):
            raise AssertionError(
                f'{wrong}\nthis block: python tests/moe_blocks.py "{block}"\n'
                f"all of them: make blocks BLOCKS={BLOCKS} SEED={SEED}"
            )

    holds()
