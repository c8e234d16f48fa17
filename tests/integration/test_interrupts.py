"""Signals that interrupt a client's calls anywhere: in its own or gRPC's Python code, and while it waits."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import trainer.report.__main__
import weightserver.cli
from tests.helpers.interrupted_calls import HORIZON, SPEC
from weightserver import LocalCluster, WeightClient
from weightserver.client.channels import Channel, Channels

SECONDS = 10
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "num_shards", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.guard)]
)
def test_interrupts_do_not_affect_later_calls(tmp_path: Path, num_shards: int) -> None:
    """Any call succeeds when it is repeated; each push counts once; no thread is left."""
    with LocalCluster(num_shards, tmp_path) as cluster:
        with WeightClient(cluster.addresses) as client:
            client.create_table(SPEC)
            client.extend_schedule(0, np.ones(HORIZON, np.float32))
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.interrupted_calls", str(SECONDS), *cluster.addresses],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            timeout=250,
            check=True,
        )
    assert int(done.stdout) > 100


def test_no_other_thread_drops_a_channel_that_an_interrupt_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """To collect it as garbage takes gRPC's locks, which a second interrupt, in the clean-up, leaves taken."""
    kept = set[Channel]()
    monkeypatch.setattr("weightserver.client.channels._called", kept)
    channels = Channels("127.0.0.1:1", None)
    channel = channels.take()
    close = channel.close

    def interrupted() -> None:
        raise KeyboardInterrupt

    channel.close = interrupted
    with pytest.raises(KeyboardInterrupt):
        channels.leave(channel, has_returned=False)
    assert kept == {channel}
    channel.close = close
    thread = threading.Thread(target=channels.close)
    thread.start()
    thread.join()
    assert kept == {channel}, "another thread closes it, and does not drop it"


def test_an_interrupted_call_leaves_no_lock_to_who_handles_its_exception() -> None:
    """As gRPC has, a lock of all channels that a suspended generator holds: for as long as a frame refers to that."""
    channels, lock = Channels("127.0.0.1:1", None), threading.Lock()

    @contextmanager
    def locked() -> Iterator[None]:
        with lock:
            yield

    def interrupted() -> None:
        entered = locked()
        entered.__enter__()
        raise KeyboardInterrupt

    channel = channels.take()
    try:
        try:
            interrupted()
        finally:
            channels.leave(channel, has_returned=False)
    except KeyboardInterrupt:
        assert not lock.locked()


def test_the_main_thread_closes_its_own_channel_only() -> None:
    """An interrupt within would leave a lock of gRPC's taken, for which another thread's call waits for ever."""
    channels, opened = Channels("127.0.0.1:1", None), list[Channel]()
    thread = threading.Thread(target=lambda: opened.append(channels.take()))
    thread.start()
    thread.join()
    opened.append(channels.take())
    closed_by_main = dict[Channel, bool]()

    def note(channel: Channel, close: Callable[[], None]) -> None:
        closed_by_main[channel] = threading.current_thread() is threading.main_thread()
        close()

    for channel in opened:
        channel.close = partial(note, channel, channel.close)
    channels.close()
    assert closed_by_main == {opened[0]: False, opened[1]: True}


@pytest.mark.parametrize("name", ["weightserver verify", "trainer report"])
def test_every_command_ends_by_the_same_words(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weightserver.operations.verify.run", interrupted)
    monkeypatch.setattr("trainer.report.rendering.render_report", interrupted)
    main = {"weightserver verify": weightserver.cli.main, "trainer report": trainer.report.__main__.main}[name]
    with pytest.raises(SystemExit) as ended:
        main([*name.split()[1:], str(tmp_path)] if main is weightserver.cli.main else [str(tmp_path)])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{name}: interrupted\n"
