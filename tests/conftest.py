"""Shared fixtures. Helpers: `ranks.run_ranks` (real gloo ranks), `gtp_compile.testing.fake_mesh` (one process)."""

import os

# Read when torch is imported, here and in each process that a test starts. Several run at once, on few cores: threads
# of one that wait for each other take the time of all.
for _pool in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_pool, "1")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Every test compiles for itself, with the same random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
