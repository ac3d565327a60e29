"""Which kernel runs is decided by the GPU, the Triton version, dtypes, strides and alignment, and by nothing else."""

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="needs Triton, which exists on Linux only")

from gtp_compile.kernels.grouped_wgrad.choice import choose_grouped_wgrad  # noqa: E402


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend to have the GPU and the Triton that the Gluon kernel is chosen for; tests take one thing away."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    pytest.importorskip("triton.experimental.gluon")
    return monkeypatch


def chosen(dy: Tensor | None = None, x: Tensor | None = None, dw: Tensor | None = None, rows: int = 24) -> str:
    dy = torch.zeros(rows, 40, dtype=torch.bfloat16) if dy is None else dy
    x = torch.zeros(rows, 72, dtype=torch.bfloat16) if x is None else x
    dw = torch.zeros(3, 40, 72) if dw is None else dw
    return choose_grouped_wgrad(dy, x, dw).__name__


def test_gluon_on_hopper(hopper: pytest.MonkeyPatch) -> None:
    assert chosen() == "grouped_wgrad_gluon"


@pytest.mark.parametrize("rows", [0, 1, 7, 4096])
def test_the_number_of_rows_does_not_matter(hopper: pytest.MonkeyPatch, rows: int) -> None:
    assert chosen(rows=rows) == "grouped_wgrad_gluon"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_triton_on_other_gpus(hopper: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen() == "grouped_wgrad_triton"


def test_triton_on_rocm(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(torch.version, "hip", "7.0")
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert chosen() == "grouped_wgrad_triton"


@pytest.mark.parametrize("version", ["3.5.1", "3.7.1", "3.10.0", "4.0.0+git1234"])
def test_triton_under_a_version_without_a_test_run(hopper: pytest.MonkeyPatch, version: str) -> None:
    hopper.setattr(triton, "__version__", version)
    assert chosen() == "grouped_wgrad_triton"


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


TAKEN = {
    "fp16": {"dy": half(24, 40, dtype=torch.float16), "x": half(24, 72, dtype=torch.float16)},
    "bf16_output": {"dw": half(3, 40, 72)},
    "wide_rows": {"dy": half(24, 64)[:, 8:48]},
    "output_window": {"dw": torch.zeros(3, 48, 80)[:, 4:-4, 4:-4]},
}
REFUSED = {
    "fp32_operands": {"dy": torch.zeros(24, 40), "x": torch.zeros(24, 72)},
    "column_major_dy": {"dy": half(40, 24).t()},
    "column_major_x": {"x": half(72, 24).t()},
    "expanded_x": {"x": half(24, 1).expand(24, 72)},
    "one_row_expanded": {"x": half(1, 72).expand(24, 72)},
    "rows_of_78_bytes": {"dy": half(24, 39), "dw": torch.zeros(3, 39, 72)},
    "odd_k": {"x": half(24, 80)[:, :68], "dw": torch.zeros(3, 40, 68)},
    "misaligned_start": {"dy": half(24, 48)[:, 1:41]},
    "output_rows_of_8_bytes_more": {"dw": torch.zeros(3, 40, 74)[..., :72]},
    "column_major_output": {"dw": torch.zeros(3, 72, 40).mT},
}


@pytest.mark.parametrize("operands", TAKEN.values(), ids=TAKEN)
def test_gluon_takes(hopper: pytest.MonkeyPatch, operands: dict[str, Tensor]) -> None:
    assert chosen(**operands) == "grouped_wgrad_gluon"  # type: ignore[arg-type]


@pytest.mark.parametrize("operands", REFUSED.values(), ids=REFUSED)
def test_triton_takes_the_rest(hopper: pytest.MonkeyPatch, operands: dict[str, Tensor]) -> None:
    assert chosen(**operands) == "grouped_wgrad_triton"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split_dim", "chunk", "kernel"), [(1, 64, "gluon"), (1, 72, "triton"), (2, 192, "gluon"), (2, 40, "triton")]
)
def test_parts_of_whole_pieces(hopper: pytest.MonkeyPatch, split_dim: int, chunk: int, kernel: str) -> None:
    """The Gluon kernel stores 64 x 64 at once, and no border of a part may cut that."""
    dw = torch.zeros(2, 3, *((chunk, 72) if split_dim == 1 else (40, chunk)))
    assert choose_grouped_wgrad(half(24, 40), half(24, 72), dw, split_dim).__name__ == f"grouped_wgrad_{kernel}"
