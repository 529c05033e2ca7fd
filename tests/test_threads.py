"""One model in several threads: every answer is right, and the weights are left as they were."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import tiny
from conftest import QUESTIONS, assert_untouched, loud_editor, weights_of

from factpatch.facts import FactEdit
from factpatch.merging import scaled_patch
from factpatch.models import TaskModel
from factpatch.patch import Patch

THREADS, ROUNDS = 4, 8


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Makes Python switch threads far more often than usual, so that races show in a short test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def bert() -> TaskModel:
    return tiny.build("bert")


@pytest.fixture
def patches(bert: TaskModel) -> list[Patch]:
    made = loud_editor(bert).propose(bert, [FactEdit(x, tiny.other_answer(bert, x)) for x in QUESTIONS])
    return [scaled_patch(patch, 30) for patch in made]


def in_threads(work: Callable[[int], object]) -> None:
    """Runs `work` with the number of the thread, several times in each of several threads that start together."""
    barrier = Barrier(THREADS)

    def repeated(number: int) -> None:
        barrier.wait()
        for _ in range(ROUNDS):
            work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(repeated, range(THREADS)))


def test_patches_applied_in_several_threads(bert: TaskModel, patches: list[Patch]) -> None:
    before = weights_of(bert)
    expected = [bert.predict_patched([patch] * len(QUESTIONS), QUESTIONS) for patch in patches]
    unpatched = bert.predict(QUESTIONS)
    assert unpatched not in expected, "the patches must show"

    def work(number: int) -> None:
        if number == 0:
            assert bert.predict(QUESTIONS) == unpatched
            return
        patch, wanted = patches[number % len(patches)], expected[number % len(patches)]
        with patch.applied(bert):
            assert bert.patches == [patch]
            assert bert.predict(QUESTIONS) == wanted
        assert bert.predict_patched([patch] * len(QUESTIONS), QUESTIONS) == wanted

    in_threads(work)
    assert bert.patches == []
    assert_untouched(bert, before)


def test_edits_made_in_several_threads(bert: TaskModel, patches: list[Patch]) -> None:
    editor = loud_editor(bert)
    before = weights_of(bert)

    def work(number: int) -> None:
        edit = patches[number % len(patches)].edits[0]
        assert editor.propose(bert, [edit])[0].edits == (edit,)
        stacks = editor.changes(bert, [edit])
        assert stacks.keys() == patches[0].deltas.keys()

    in_threads(work)
    assert_untouched(bert, before)


def test_a_copied_model_has_its_own_lock(bert: TaskModel) -> None:
    """Training measures a copy of the model."""
    copied = copy.deepcopy(bert)
    with bert.lock, ThreadPoolExecutor(1) as pool:
        assert pool.submit(copied.predict, QUESTIONS).result() == bert.predict(QUESTIONS)
