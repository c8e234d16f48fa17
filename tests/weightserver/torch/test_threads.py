"""Work in parts on threads of one each."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from weightserver.torch import condensed, cosine_softmax_loss
from weightserver.torch.threads import in_threads


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_items_in_order_by_single_threads_without_autograd() -> None:
    seen = in_threads(lambda item: (item, torch.get_num_threads(), torch.is_grad_enabled()), range(20))
    assert seen == [(item, 1, False) for item in range(20)]
    assert in_threads(lambda item: item, []) == []


def test_the_number_of_threads_stays() -> None:
    """Also that of threads that begin later, and after an error."""
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda item: 1 // item, [2, 1, 0])
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [3, 3]


def test_threads_last() -> None:
    turn = threading.Barrier(3)  # each of the three threads takes part

    def thread(_: int) -> threading.Thread:
        turn.wait(60)
        return threading.current_thread()

    assert set(in_threads(thread, range(12))) == set(in_threads(thread, range(12)))


def test_a_forked_process_has_threads_of_its_own() -> None:
    assert in_threads(abs, [-1, -2]) == [1, 2]
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(in_threads(abs, [-3, -4])[1]))
    process.start()
    process.join(30)
    assert process.exitcode == 4


@pytest.mark.guard  # seconds, for another process that imports torch
def test_work_after_the_main_thread_has_ended() -> None:
    code = (
        "import threading, torch; torch.set_num_threads(3); from weightserver.torch.threads import in_threads as run;"
    )
    code += "threading.Thread(target=lambda: (threading.main_thread().join(), print(run(abs, [-1, -2])))).start()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[1, 2]\n"


def test_few_images_make_chunks_for_many_threads() -> None:
    for batch_size, dim in ((1, 128), (8, 128), (64, 2_048)):
        groups = condensed._groups(torch.empty(65_536, dim, device="meta"), torch.zeros(batch_size, 1))
        assert len(groups) == 16


def test_the_number_of_threads_changes_no_bit_of_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condensed, "_FEW_VALUES", 0)
    monkeypatch.setattr(condensed, "_LOGITS_OF_CHUNK", 64 * 64)
    generator = torch.Generator().manual_seed(0)
    features, weight = torch.randn(64, 32, generator=generator), torch.randn(3_000, 32, generator=generator)
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        z, w = features.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = cosine_softmax_loss(z, w, torch.arange(64), temperature=0.2)
        loss.backward()
        assert z.grad is not None
        assert w.grad is not None
        results.append(torch.cat([loss.detach()[None], z.grad.flatten(), w.grad.flatten()]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_evaluation_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    features, weight, labels = torch.randn(6, 5), torch.randn(30, 5), torch.arange(6)
    expected = cosine_softmax_loss(features, weight, labels, temperature=0.2)
    monkeypatch.setattr(condensed, "_FEW_VALUES", 0)
    monkeypatch.setattr(condensed, "_LOGITS_OF_CHUNK", 0)
    monkeypatch.setattr(condensed, "_ROWS_OF_PRODUCT", 4)
    with torch.inference_mode():
        loss = cosine_softmax_loss(features + 0, weight + 0, labels, temperature=0.2)
    torch.testing.assert_close(loss, expected)
