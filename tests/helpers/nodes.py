"""Machines that are network namespaces of this one: each with an address, a loopback and a cable of its own.

A namespace lives as long as processes are in it. What holds one reads a pipe of this process and so ends with it,
however that ends; no namespace has a name and the host's own network is not touched, so nothing remains.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Node:
    """One machine on the network 10.77.0.0/24."""

    namespace: str
    """A path that stands for it while the node is there."""
    address: str

    @property
    def inside(self) -> list[str]:
        """The prefix of a command that runs on this node; its process becomes the command's."""
        return ["nsenter", f"--net={self.namespace}"]

    def run(self, command: str) -> None:
        subprocess.run([*self.inside, *command.split()], check=True)

    def unplug(self) -> None:
        """Drops all packets from now on without notifying any peer."""
        self.run("ip link set eth0 down")


@contextmanager
def connected_nodes(number: int) -> Iterator[list[Node]]:
    """So many nodes at one switch, which is a namespace too. Skips the test where namespaces cannot be made."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"network namespaces cannot be made here: there is no command {tool!r}")
    with ExitStack() as stack:
        switch, *namespaces = (_namespace(stack) for _ in range(1 + number))
        nodes = [Node(path, f"10.77.0.{index + 1}") for index, path in enumerate(namespaces)]
        hub = Node(switch, "")
        hub.run("ip link add switch type bridge")
        hub.run("ip link set switch up")
        for index, node in enumerate(nodes):
            process = node.namespace.split("/")[2]
            hub.run(f"ip link add port{index} type veth peer name eth0 netns {process}")
            hub.run(f"ip link set port{index} master switch up")
            for command in (f"address add {node.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                node.run(f"ip {command}")
        yield nodes


@contextmanager
def no_network() -> Iterator[list[str]]:
    """The prefix of commands that reach each other by a loopback of their own, and nothing else; empty where namespaces
    cannot be made."""
    with ExitStack() as stack:
        try:
            node = Node(_namespace(stack), "127.0.0.1")
        except (pytest.skip.Exception, FileNotFoundError):
            yield []
        else:
            node.run("ip link set lo up")
            yield node.inside


def _namespace(stack: ExitStack) -> str:
    process = stack.enter_context(
        subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    stack.callback(process.stdin.close)
    if not process.stdout.readline():
        pytest.skip(f"network namespaces cannot be made here, which takes root: {process.stderr.read().strip()}")
    return f"/proc/{process.pid}/ns/net"
