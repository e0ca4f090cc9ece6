"""The two toy examples of the paper and the problem of the reference, as `examples/` tells them."""

import re
import runpy
from types import ModuleType

import pytest
import reference
import torch
import toy_1_sign_flip
import toy_2_orthogonal

from trgp import GPM, TRGP


@pytest.mark.parametrize("method", [GPM, TRGP])
def test_the_sign_flip_is_what_it_says(method: type[GPM]) -> None:
    """Task 2 has the negated inputs and the same targets; task 1 is learnt and not forgotten."""
    (x, y), (flipped, same) = toy_1_sign_flip.make_tasks()
    assert torch.equal(flipped, -x)
    assert torch.equal(same, y)
    outcome = toy_1_sign_flip.run(method)
    assert outcome.task_1_before < 1e-8
    assert outcome.task_1_after == pytest.approx(outcome.task_1_before, abs=1e-10)
    assert outcome.task_2_before > 0.5
    assert outcome.weight_change < 1e-5


def test_gpm_cannot_learn_the_sign_flip_and_trgp_can() -> None:
    gpm, trgp = toy_1_sign_flip.run(GPM), toy_1_sign_flip.run(TRGP)
    assert gpm.task_2_before == trgp.task_2_before
    assert gpm.task_2_after == pytest.approx(gpm.task_2_before)
    assert trgp.task_2_after < 1e-6 * gpm.task_2_after


@pytest.mark.parametrize("method", [GPM, TRGP])
def test_with_orthogonal_inputs_the_projected_step_is_steepest_descent(method: type[GPM]) -> None:
    (x, _), (other, _) = toy_2_orthogonal.make_tasks()
    assert (x @ other.T).abs().max() < 1e-5
    outcome = toy_2_orthogonal.run(method)
    assert outcome.steepest_step > 0.1
    assert outcome.step_difference < 1e-6 * outcome.steepest_step
    assert outcome.related_tasks == 0
    assert outcome.task_1_after == pytest.approx(outcome.task_1_before, abs=1e-10)
    assert outcome.task_2_after < 1e-6 * outcome.task_2_before


@pytest.mark.parametrize("toy", [toy_1_sign_flip, toy_2_orthogonal])
def test_it_shows_the_losses_of_both_methods(
    toy: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.main()
    shown = capsys.readouterr().out
    for method in (GPM, TRGP):
        outcome = toy.run(method)
        assert method.__name__ in shown
        assert f"{outcome.task_2_before:.2e}" in shown
        assert f"{outcome.task_2_after:.2e}" in shown


def test_the_reference_shows_by_itself_what_each_method_forgets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(reference.__file__, run_name="__main__")
    shown = re.findall(r"(\d+)% with", capsys.readouterr().out)
    fine_tuning, gpm, trgp = map(int, shown)
    assert fine_tuning < gpm < trgp
