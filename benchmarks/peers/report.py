"""The tables and the plot of benchmarks.peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.peers.peer import Peer
from benchmarks.peers.worker import OPERATIONS, Case

_MARKERS = "osD^v<>Ph"
Results = dict[str, dict[str, "Measured"]]
"""Of each case, by key of the peer."""


@dataclass(frozen=True)
class Measured:
    """The calls of one peer in one case."""

    p25: float
    p50: float
    p75: float
    """Seconds."""
    num_calls: int
    processor_seconds: float
    """Of client and server together, a call, with what they did in the background."""
    server_bytes: int
    """The server's largest memory; 0 if the client holds the rows."""
    client_bytes: int
    """The client's largest growth."""

    @classmethod
    def of(cls, seconds: list[float], processor_seconds: float, server_bytes: int, client_bytes: int) -> Measured:
        p25, p50, p75 = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(p25, p50, p75, len(seconds), processor_seconds, server_bytes, client_bytes)

    def __str__(self) -> str:
        return f"{_milliseconds(self.p50)} ({_milliseconds(self.p25)}–{_milliseconds(self.p75)}) ms"


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def as_table(
    peers: list[type[Peer]], fills: dict[str, float], left_out: dict[str, str], cases: list[Case], results: Results
) -> str:
    """Peers with memory, the ratios at a glance, and all times."""
    lines = [
        "Medians with quartiles; a ratio is that of the medians, below 1 where the peer is faster. Every row had been "
        "fetched once, so that all are in memory. Every fetch of ours corrects its rows, and every write of ours "
        "applies gradients with momentum: a row is twice as long as the peers', which read and replace weights only, "
        "and lies in a block of 63. Memory is the process's own and "
        "shared memory at most; pages of files (LMDB's map, the page cache) are not counted, and the client's is what "
        "it grew by since it connected. Processor time is that of client and server, with what they do in the "
        "background.",
        "",
        "| peer | durable | memory of the server | growth of the client | fill | does not do |",
        "|---|---|---|---|---|---|",
    ]
    for peer in peers:
        of_peer = [measured[peer.key] for measured in results.values()]
        server, client = (
            max(sizes) for sizes in zip(*((m.server_bytes, m.client_bytes) for m in of_peer), strict=True)
        )
        cells = [peer.name, "yes" if peer.durable else "no", _mebibytes(server) if server else "embedded"]
        cells += [_mebibytes(client), f"{fills[peer.key]:.1f} s", ", ".join(peer.does_not) or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{name} was left out: {reason}." for name, reason in left_out.items()]
    others = peers[1:]
    lines += ["", "Times ours:", "", f"| case | ours | {' | '.join(peer.name for peer in others)} |"]
    lines += ["|---" * (len(peers) + 1) + "|"]
    for case in cases:
        ours = results[str(case)]["ours"]
        ratios = [f"{results[str(case)][peer.key].p50 / ours.p50:.2f}" for peer in others]
        lines.append(f"| {case} | {ours} | {' | '.join(ratios)} |")
    lines += ["", "| case | peer | time | ratio to ours | processor time a call | calls |", "|---|---|---|---|---|---|"]
    lines += _all_times(peers, cases, results)
    return "\n".join([*lines, "", "![Times of all peers](peers.png)"])


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _all_times(peers: list[type[Peer]], cases: list[Case], results: Results) -> Iterator[str]:
    for case in cases:
        ours = results[str(case)]["ours"]
        for peer in peers:
            measured = results[str(case)][peer.key]
            yield (
                f"| {case} | {peer.name} | {measured} | {measured.p50 / ours.p50:.2f} | "
                f"{_milliseconds(measured.processor_seconds)} ms | {measured.num_calls} |"
            )


def draw(path: Path, peers: list[type[Peer]], cases: list[Case], results: Results) -> None:
    """One panel an operation, one line a case, one marker a peer: hollow if a write is not durable."""
    panels = {name: [case for case in cases if case.operation == name] for name in OPERATIONS}
    panels = {name: of_panel for name, of_panel in panels.items() if of_panel}
    height = 1.6 + max(0.4, 0.07 * len(peers)) * max(map(len, panels.values()))
    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), height), squeeze=False)
    for axes, (name, of_panel) in zip(all_axes[0], panels.items(), strict=True):
        for index, peer in enumerate(peers):
            measured = [results[str(case)][peer.key] for case in of_panel]
            shift = (index - (len(peers) - 1) / 2) * 0.8 / len(peers)
            colour = f"C{index}" if index else "black"
            axes.errorbar(
                [1e3 * one.p50 for one in measured],
                [line + shift for line in range(len(of_panel))],
                xerr=[[1e3 * (one.p50 - one.p25) for one in measured], [1e3 * (one.p75 - one.p50) for one in measured]],
                fmt=_MARKERS[index % len(_MARKERS)],
                color=colour,
                markerfacecolor=colour if peer.durable else "white",
                markersize=5,
                linewidth=0.8,
                label=peer.name + ("" if peer.durable else " (not durable)"),
            )
        axes.set_yticks(range(len(of_panel)), [f"{case.num_rows:,}\n{case.pattern}" for case in of_panel], fontsize=8)
        for line in range(len(of_panel) - 1):
            axes.axhline(line + 0.5, color="0.85", linewidth=0.6)
        axes.set(xscale="log", xlabel="ms", title={"mixed": "fetch and write of the same rows"}.get(name, name))
        axes.set_ylim(len(of_panel) - 0.5, -0.5)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.tight_layout(rect=(0, 0.7 / height, 1, 1))
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(5, len(labels)), frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
