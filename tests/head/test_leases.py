"""A head keeps its servers to itself while it lives, although resident rows may not reach them for many steps."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from tests.head.conftest import MakeHead
from tests.head.test_exact import windows
from tests.helpers.own_loop import DIM, NUM_CLASSES, trained
from tests.helpers.watching import wait_until
from tests.integration.test_leases import is_lost
from weightserver import FencedError, SessionInUseError
from weightserver.common import processes


def test_a_second_head_is_refused_and_may_take_over(make_head: MakeHead, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_head(run="first", capacity=NUM_CLASSES)
    loader = windows(first)
    for ids, _ in itertools.islice(first.announced(loader), 3):
        first(torch.ones(len(ids), DIM, requires_grad=True), ids).backward()
        first.step(0.1)
    monkeypatch.setattr(processes, "process_id", lambda: os.urandom(16))  # as if each head were in its own
    second = make_head(run="second")
    with pytest.raises(SessionInUseError, match="run 'first' uses these weight servers"):
        trained(second, [second.announced(windows(second))], steps=1)
    third = make_head(run="third", take_over=True)
    trained(third, [third.announced(windows(third))], steps=3)
    client = first.client
    assert client is not None
    wait_until(lambda: is_lost(client))
    with pytest.raises(FencedError, match="superseded"):
        next(iter(first.announced(loader)))
