"""The Gluon kernels compile for Hopper with the installed Triton: no GPU is needed, and Gluon's names do change."""

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs Triton, which exists on Linux only")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")


def assert_fits_hopper(compiled: Any) -> None:
    assert compiled.metadata.shared <= 227 << 10, "more shared memory than a Hopper SM has"
    sass = compiled.asm["sass"]
    assert "HGMMA" in sass
    assert "STL" not in sass and "LDL" not in sass, "registers do not suffice"


@pytest.mark.parametrize(
    ("out_type", "accumulate", "split_dim"),
    [("fp32", False, 0), ("fp32", True, 0), ("bf16", False, 0), ("fp32", False, 1), ("fp32", False, 2)],
)
def test_grouped_wgrad_compiles_for_hopper(out_type: str, accumulate: bool, split_dim: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from gtp_compile.kernels.grouped_wgrad.gluon import _grouped_wgrad_gluon_kernel
    from gtp_compile.kernels.hopper import swizzled

    dw_layout = swizzled(4 if out_type == "fp32" else 2, 3)
    signature = {
        "dy_desc": f"tensordesc<bf16[1, 1, 64, 64],{swizzled(2, 4)!r}>",
        "x_desc": f"tensordesc<bf16[1, 1, 64, 128],{swizzled(2, 4)!r}>",
        "dw_desc": f"tensordesc<{out_type}[1, 64, 64],{dw_layout!r}>",
        "offs_ptr": "*i32",
        "R": "i32",
        "parts": "i32",
        "ACCUMULATE": "constexpr",
        "SPLIT_DIM": "constexpr",
    }
    constants = {"ACCUMULATE": accumulate, "SPLIT_DIM": split_dim}
    source = GluonASTSource(_grouped_wgrad_gluon_kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert_fits_hopper(compiled)


@pytest.mark.parametrize(
    ("split_dim", "k_innermost", "has_bias"),
    [(0, True, True), (1, True, False), (2, False, False), (1, False, False)],
)
def test_grouped_linear_compiles_for_hopper(split_dim: int, k_innermost: bool, has_bias: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from gtp_compile.kernels.grouped_linear.gluon import _grouped_linear_gluon_kernel
    from gtp_compile.kernels.hopper import swizzled

    size = 64 if split_dim == 1 else 128
    box = f"{size}, 64" if k_innermost else f"64, {size}"
    constants = {"SPLIT_DIM": split_dim, "K_INNERMOST": k_innermost, "HAS_BIAS": has_bias}
    signature = {
        "x_desc": f"tensordesc<bf16[1, 1, 64, 64],{swizzled(2, 4)!r}>",
        "weight_desc": f"tensordesc<bf16[1, 1, {box}],{swizzled(2, 4)!r}>",
        "y_desc": f"tensordesc<bf16[1, 1, 64, 128],{swizzled(2, 4)!r}>",
        "offs_ptr": "*i32",
        "bias_ptr": "*bf16",
        **dict.fromkeys(("R", "E", "N", "K"), "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = GluonASTSource(_grouped_linear_gluon_kernel, signature, constants)
    assert_fits_hopper(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}))
