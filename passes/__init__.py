"""Graph rewrites, in pipeline order. They know torch.fx and our ops, and no compiler entry point.

What every pass keeps (see also `gtp_compile.checks`): each node's `meta["val"]` is true; the graph's outputs keep
their number and order; nothing depends on the order of a set; no mutation before `accumulate_main_grads`.
"""

from gtp_compile.passes.accumulate_main_grads import accumulate_main_grads
from gtp_compile.passes.base import PassContext, PassReport
from gtp_compile.passes.fuse_dgrads import fuse_dgrads
from gtp_compile.passes.fuse_gathers import fuse_gathers
from gtp_compile.passes.fuse_linears import fuse_linears
from gtp_compile.passes.fuse_wgrads import fuse_wgrads
from gtp_compile.passes.group_wgrads import group_wgrads
from gtp_compile.passes.insert_collectives import insert_collectives
from gtp_compile.passes.order_collectives import order_collectives
from gtp_compile.passes.recompute_gathers import recompute_gathers
from gtp_compile.passes.retype_wgrads import retype_wgrads

__all__ = [
    "PassContext",
    "PassReport",
    "accumulate_main_grads",
    "fuse_dgrads",
    "fuse_gathers",
    "fuse_linears",
    "fuse_wgrads",
    "group_wgrads",
    "insert_collectives",
    "order_collectives",
    "recompute_gathers",
    "retype_wgrads",
]
