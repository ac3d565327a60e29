"""Shared fixtures. Helpers: `ranks.run_ranks` (real gloo ranks), `gtp_compile.testing.fake_mesh` (one process)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Every test compiles for itself, with the same random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
