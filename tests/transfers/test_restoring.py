"""Which layers a launch serves: decided without Triton, and so tested without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from hiqcache.transfers.restoring import Asking, Restoring, Step

ROOT = Path(__file__).parents[2]
HOST, DEVICE = torch.arange(4), torch.arange(4)


def steps(restoring: Restoring, layers: int, most: int) -> list[Step | None]:
    """What is enqueued where a restore asks for its layers in their order."""
    return [restoring.step(layer, HOST, DEVICE, 7, most) for layer in range(layers)]


@given(layers=st.integers(1, 100), most=st.integers(1, 100))
def test_a_restore_enqueues_every_layer_once_and_none_late(layers: int, most: int) -> None:
    enqueued: list[int] = []
    for layer, step in enumerate(steps(Restoring(layers), layers, most)):
        if step is not None:
            assert step.layer == layer
            assert step.layers <= most
            enqueued += range(step.layer, step.layer + step.layers)
        assert layer in enqueued, "attention would read what nothing has restored"
    assert enqueued == list(range(layers))


def test_steps_double_up_to_the_most() -> None:
    given_steps = [step for step in steps(Restoring(36), 36, 8) if step is not None]
    assert [step.layers for step in given_steps] == [1, 2, 4, 8, 8, 8, 5]


def test_the_next_restore_begins_anew_with_one_layer() -> None:
    restoring = Restoring(12)
    first = steps(restoring, 12, 4)
    # The same tensors once more: a restore that is complete is forgotten.
    assert steps(restoring, 12, 4) == first


def test_a_restore_that_breaks_off_serves_nothing_of_the_next() -> None:
    restoring = Restoring(12)
    assert steps(restoring, 4, 8) == [Step(0, 1), Step(1, 2), None, Step(3, 4)]
    # Layers 4 to 6 are enqueued, of other rows.
    other = torch.arange(4)
    assert restoring.step(4, other, DEVICE, 7, 8) == Step(4, 1)


def test_layers_out_of_order_are_restored_one_by_one() -> None:
    restoring = Restoring(12)
    asked = [5, 3, 4, 9, 9]
    assert [restoring.step(layer, HOST, DEVICE, 7, 8) for layer in asked] == [
        *(Step(5, 1), Step(3, 1), Step(4, 2), Step(9, 1), Step(9, 1))
    ]


def test_another_stream_is_another_restore() -> None:
    restoring = Restoring(12)
    assert steps(restoring, 2, 8) == [Step(0, 1), Step(1, 2)]
    assert restoring.step(2, HOST, DEVICE, 8, 8) == Step(2, 1)


def test_a_step_that_failed_is_enqueued_again() -> None:
    restoring = Restoring(12)
    assert steps(restoring, 2, 8) == [Step(0, 1), Step(1, 2)]
    restoring.fail()
    assert restoring.step(1, HOST, DEVICE, 7, 8) == Step(1, 1)


def test_a_restore_is_known_by_its_tensors() -> None:
    asking = Asking()
    assert asking.begins(0, HOST, DEVICE, None)
    assert not asking.begins(1, HOST, DEVICE, None)
    # Equal ones of another restore are not the same ones.
    assert asking.begins(2, HOST.clone(), DEVICE, None)
    asking.forget()
    assert asking.begins(3, HOST, DEVICE, None)


def test_all_of_this_runs_where_there_is_no_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tests.transfers import test_restoring as tests\n"
        "for test in tests.WITHOUT_TRITON: test()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert len(WITHOUT_TRITON) == 8


WITHOUT_TRITON = [
    test
    for name, test in list(globals().items())
    if name.startswith("test_") and test is not test_all_of_this_runs_where_there_is_no_triton
]
