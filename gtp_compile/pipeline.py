"""The pipeline: every pass, in order. Nothing else decides the order."""

from gtp_compile.passes import (
    accumulate_main_grads,
    fuse_dgrads,
    fuse_gathers,
    fuse_linears,
    fuse_wgrads,
    group_wgrads,
    insert_collectives,
    order_collectives,
    recompute_gathers,
    retype_wgrads,
)
from gtp_compile.passes.base import Pass
from gtp_compile.passes.record_operands import record_operands

__all__ = ["BACKWARD_PASSES", "INFERENCE_PASSES", "JOINT_PASSES", "PASS_NAMES", "VERIFY_PASSES"]

# Forward and backward in one graph, functional, before it is partitioned.
JOINT_PASSES: tuple[Pass, ...] = (
    group_wgrads,  # first: the others need to know which gradients belong together, and a weight's sum in one place
    retype_wgrads,  # before fuse: it decides what the GEMMs write, fuse only how
    fuse_wgrads,  # while the wgrad still ends in its anchor, which tells it apart from the user's own GEMMs
    fuse_dgrads,  # while a gathered weight is one node
    insert_collectives,  # after all that looks for anchors
    fuse_gathers,  # once there are gathers
    fuse_linears,  # what the one before leaves
    recompute_gathers,  # last: it tags what those before inserted, and views of it that the user's code made
)

# After the partition, in the backward graph.
BACKWARD_PASSES: tuple[Pass, ...] = (
    accumulate_main_grads,  # the first mutation of the whole pipeline
    order_collectives,  # last: nothing may move a collective behind it
)

# Under no_grad there is no joint graph and no partition.
INFERENCE_PASSES: tuple[Pass, ...] = (insert_collectives, fuse_gathers, fuse_linears)

PASS_NAMES: tuple[str, ...] = tuple(p.__name__ for p in (*JOINT_PASSES, *BACKWARD_PASSES))

# Only in graphs compiled for `verify`: just before the anchors go, when the wgrads are what they will be.
VERIFY_PASSES: tuple[tuple[str, Pass], ...] = (("insert_collectives", record_operands),)
