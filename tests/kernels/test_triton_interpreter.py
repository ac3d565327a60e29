import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs Triton, which exists on Linux only")
numpy = pytest.importorskip("numpy")

# Its interpreter makes scalars of arrays with one element, which numpy stopped doing.
ENDS_IN_NUMPY = triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)


@pytest.mark.skipif(ENDS_IN_NUMPY, reason="the interpreter of Triton 3.6 fails with numpy 2.4")
def test_kernels_under_the_interpreter() -> None:
    """Run the kernel sources on CPU, in a process of their own: the switch is read when triton is imported."""
    script = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(script)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=script.parent, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
