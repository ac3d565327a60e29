"""What `torch.compile(..., backend="gtp", options={...})` takes, refuses and hands on."""

from dataclasses import fields

import pytest
import torch

from gtp_compile._compat import list_mode_options
from gtp_compile.config import GtpOptions, parse_options
from gtp_compile.pipeline import PASS_NAMES


def test_nothing_given():
    assert parse_options(None, None) == (GtpOptions(), {})
    assert parse_options("default", {}) == (GtpOptions(), {})


def test_ours_are_taken_and_inductors_handed_on():
    options, patches = parse_options(
        None, {"inner": "eager", "strict": True, "max_autotune": True, "triton.cudagraphs": False}
    )
    assert options == GtpOptions(inner="eager", strict=True)
    assert patches == {"max_autotune": True, "triton.cudagraphs": False}


def test_dashes_are_read_as_in_torch_compile():
    options, patches = parse_options(None, {"debug-dir": "graphs", "max-autotune": True})
    assert options.debug_dir == "graphs"
    assert patches == {"max_autotune": True}


def test_what_the_caller_gave_is_not_changed():
    given = {"mode": "max-autotune", "inner": "eager"}
    parse_options(None, given)
    assert given == {"mode": "max-autotune", "inner": "eager"}


# Modes.


@pytest.mark.parametrize("mode", sorted(set(list_mode_options()) - {"default"}))
def test_a_mode_is_a_set_of_inductors_options(mode):
    wanted = dict(list_mode_options()[mode])
    assert parse_options(mode, None)[1] == wanted
    assert parse_options(None, {"mode": mode})[1] == wanted  # torch refuses mode and options together


def test_options_count_more_than_the_mode():
    _, patches = parse_options(None, {"mode": "max-autotune", "max_autotune": False})
    assert patches["max_autotune"] is False


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown mode 'fastest'; known are default, .*max-autotune"):
        parse_options("fastest", None)


# Errors.


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown option 'debug_dri'") as error:
        parse_options(None, {"debug_dri": "x"})
    for field in fields(GtpOptions):
        assert field.name in str(error.value)
    assert "mode" in str(error.value)
    assert "torch._inductor.config" in str(error.value)


def test_an_unknown_pass_lists_the_known_ones():
    with pytest.raises(ValueError, match="no pass 'retype'; known are " + ", ".join(PASS_NAMES)):
        parse_options(None, {"disable": ["retype"]})


def test_an_unknown_inner_names_the_two():
    with pytest.raises(ValueError, match="inner is 'inductor' or 'eager', got 'triton'"):
        parse_options(None, {"inner": "triton"})


@pytest.mark.parametrize("name", ["insert_collectives", "accumulate_main_grads", "order_collectives"])
def test_passes_without_which_gradients_are_lost_stay(name):
    with pytest.raises(
        ValueError, match=f"training is wrong without {name}; run single passes with gtp_compile.testing"
    ):
        parse_options(None, {"disable": [name]})


@pytest.mark.parametrize(
    "disable", ["retype_wgrads", ["retype_wgrads"], ("retype_wgrads",)], ids=["str", "list", "tuple"]
)
def test_passes_are_switched_off_by_name(disable):
    assert parse_options(None, {"disable": disable})[0].disable == ("retype_wgrads",)


# Through torch.compile.


def test_errors_reach_the_user_of_torch_compile():
    with pytest.raises(Exception, match="unknown option 'inter'"):
        torch.compile(torch.nn.Linear(2, 2), backend="gtp", options={"inter": "eager"})(torch.randn(1, 2))


def test_every_option_has_a_line_of_doc():
    for field in fields(GtpOptions):
        assert f"\n        {field.name}: " in GtpOptions.__doc__, field.name


def test_options_are_hashable_plain_data():
    """They are part of the compile cache's key."""
    assert len({GtpOptions(), GtpOptions(), GtpOptions(strict=True)}) == 2
    assert "strict=True" in repr(GtpOptions(strict=True))
