"""Random mixture-of-experts blocks on two ranks, each beside its twin (see `moe_blocks`).

The same blocks every time, unless the environment asks for others: GTP_BLOCKS of them from GTP_SEED on
(`make blocks BLOCKS=5000 SEED=7`).
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from moe_blocks import Block, blocks, failure

BLOCKS = int(os.environ.get("GTP_BLOCKS", "300"))
SEED = int(os.environ.get("GTP_SEED", "0"))
PARTS = 30  # so that several workers share them


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_blocks_train_like_their_twins(part):
    for number in range(part, BLOCKS, PARTS):
        holds_for_block(number)


def holds_for_block(number: int) -> None:
    """Check one block, and shrink it if it is wrong.

    One run of hypothesis for each: in a longer run it draws most blocks as variations of the one before. Of the two
    examples here, the first is always the simplest block there is.
    """
    examples = 0

    @seeded(f"{SEED}.{number}")
    @settings(
        max_examples=2, deadline=None, database=None, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(block=blocks())
    def holds(block: Block) -> None:
        nonlocal examples
        examples += 1
        if examples > 1 and (wrong := failure(block)):
            raise AssertionError(
                f'{wrong}\nthis block: python tests/moe_blocks.py "{block}"\n'
                f"all of them: make blocks BLOCKS={BLOCKS} SEED={SEED}"
            )

    holds()
