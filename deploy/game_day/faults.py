"""What breaks on a game day, and which alerts tell of it after how long."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from deploy.game_day.place import BROKEN, Place, client
from weightserver.operations.certificates import write_certificates

Break = Callable[[Place, threading.Event, ExitStack], None]
"""Breaks a place, until the event is set or for good; what it starts ends with the stack."""


class Panel(NamedTuple):
    """A panel of the dashboards, which names a shard by the largest or smallest value of one of its queries."""

    title: str
    extreme: Callable[..., Any]
    query: int = 0


@dataclass(frozen=True)
class Fault:
    """One fault, its cluster's kind, and what must become of it."""

    what: str
    kind: str
    breaks: Break
    alerts: dict[str, tuple[float, float]]
    """Alerts that must fire, and within how many seconds at a scrape every 5 and every 60 s."""
    also: frozenset[str] = frozenset()
    """Critical alerts that may fire too; no other one may. Warnings, as of a busy machine, page nobody."""
    ready: str = "SERVING"
    """Pattern of what /readyz of the broken shard says at the end."""
    names_shard: bool = True
    """Whether the alert must name the shard that breaks: it is not both."""
    panels: tuple[Panel, ...] = ()
    """Panels that name the broken shard."""
    muted: frozenset[str] = frozenset()
    """Alerts that another one mutes in the end."""
    is_short: bool = False
    """Whether the short form has it."""


def _kill(place: Place) -> None:
    place.cluster.processes[BROKEN].kill()
    place.cluster.processes[BROKEN].wait()


def _restart_once(place: Place, stop: threading.Event, _: ExitStack) -> None:
    """In the moment of a scrape, which fails."""
    stop.wait(max(0.0, place.until_scrape() - place.outage_seconds / 2))
    _kill(place)
    stop.wait(place.outage_seconds)
    place.cluster.restart(BROKEN)


def _kill_in_a_loop(place: Place, stop: threading.Event, _: ExitStack) -> None:
    while not stop.wait(4 * place.outage_seconds):
        _kill(place)
        place.cluster.restart(BROKEN)


def _freeze(place: Place, stop: threading.Event, stack: ExitStack) -> None:
    process = place.cluster.processes[BROKEN]
    process.send_signal(signal.SIGSTOP)
    stack.callback(process.send_signal, signal.SIGCONT)


def _fill(place: Place, stop: threading.Event, _: ExitStack) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={place.data}/other", "bs=1M"], capture_output=True, check=False)


def _slow_down(place: Place, stop: threading.Event, _: ExitStack) -> None:
    (place.directory / "slow").touch()


def _put_back(place: Place, stop: threading.Event, _: ExitStack) -> None:
    """Copies a directory as it was, lets the run write on, and serves the copy."""
    place.cluster.restart(BROKEN)
    _kill(place)
    old = place.directory / "old"
    shutil.copytree(place.data, old)
    place.cluster.restart(BROKEN)
    stop.wait(place.outage_seconds)
    _kill(place)
    shutil.rmtree(place.data)
    old.rename(place.data)
    place.cluster.restart(BROKEN)


def _call_with_another_token(place: Place, stop: threading.Event, stack: ExitStack) -> None:
    write_certificates(place.directory / "other", ["127.0.0.1"])
    wrong = [*place.security, f"--token-file={place.directory}/other/token"]
    stack.enter_context(client(place.cluster.addresses, wrong, place.directory / "other.log"))


def _kill_trainer(place: Place, stop: threading.Event, _: ExitStack) -> None:
    assert place.trainer is not None
    place.trainer.kill()


def _drain(place: Place, stop: threading.Event, _: ExitStack) -> None:
    place.is_target[BROKEN] = False
    place.cluster.processes[BROKEN].terminate()


def _nothing(place: Place, stop: threading.Event, _: ExitStack) -> None:
    """The certificate expires by itself."""


_STANDS_STILL = frozenset({"FetchStuck", "FetchSlow", "WritesUnavailable", "ShardDown"})
FAULTS = {
    "restart": Fault("a shard is killed and back after 11 s, once", "plain", _restart_once, {}, is_short=True),
    "loop": Fault(
        "a shard is killed again and again",
        "plain",
        _kill_in_a_loop,
        {"ShardRestarts": (300, 480)},
        also=_STANDS_STILL,
        ready=".*",
        panels=(Panel("Does any shard restart, or does not serve?", max),),
    ),
    "frozen": Fault(
        "a shard's process is stopped (SIGSTOP)",
        "plain",
        _freeze,
        {"FetchStuck": (120, 240), "ShardDown": (180, 300)},
        also=_STANDS_STILL,
        ready="no answer",
        panels=(Panel("Is every shard up?", min), Panel("Which shard do clients wait for now?", max)),
        muted=frozenset({"FetchStuck"}),
        is_short=True,
    ),
    "full": Fault(
        "another file fills a shard's volume",
        "small",
        _fill,
        {"DiskFull": (120, 240)},
        also=frozenset({"CallsFail", "WritesUnavailable"}),  # if a write needs new pages
        ready="NOT_READY: .*(nearly full|No space left)",
        panels=(Panel("How much space is left, now and in four hours?", min),),
    ),
    "slow": Fault(
        "each sync of a shard's disk takes two seconds",
        "slow",
        _slow_down,
        {"CommitsSlow": (780, 900)},
        panels=(Panel("How long until a write is on disk?", max, query=1),),
    ),
    "expired": Fault(
        "a certificate expires",
        "expiring",
        _nothing,
        {"CertificateExpires": (150, 240)},
        also=_STANDS_STILL,
        ready="NOT_READY: .*expired on .*renew it",
        names_shard=False,
        is_short=True,
    ),
    "older": Fault(
        "an older directory is put back under a shard",
        "plain",
        _put_back,
        {"CallsFail": (180, 300)},
        also=frozenset({"FetchSlow", "FetchStuck", "WritesUnavailable"}),  # each call is retried, and fails
        panels=(Panel("Does any shard fail calls for good?", max),),
        is_short=True,
    ),
    "token": Fault(
        "a second client calls with a wrong token",
        "secure",
        _call_with_another_token,
        {"TokensRefused": (420, 540)},
        names_shard=False,  # it calls both
    ),
    "trainer": Fault("the trainer is killed", "trainer", _kill_trainer, {"TrainerGone": (780, 900)}),
    "drained": Fault(
        "a shard ends and its target vanishes, as with a drained node",
        "plain",
        _drain,
        {"ShardDown": (240, 360)},
        also=_STANDS_STILL,
        ready="no answer",
        panels=(Panel("Which shard do clients wait for now?", max),),
    ),
}
