"""The commands of docs/runbook.md, and what they become beside a cluster.

python -m deploy.runbook compose|kubectl [ALERT ...]     # prints them as they are run in containers
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNBOOK = Path(__file__).parent.parent / "docs/runbook.md"
COMMANDS = {
    section.partition("\n")[0]: re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    for section in RUNBOOK.read_text().split("\n## ")[1:]
}
"""Name of each section, and its commands."""
CHANGES_OR_NEEDS_MORE = (
    "pic train ",
    "weightserver verify ",
    "iostat ",
    "dmesg ",
    "openssl ",
    "ps ",
    "df -h runs/",
)
"""Commands that resume a run, need a stopped shard, or look at a machine that a test does not have."""
ON_THE_MACHINE = ("pic ", "iostat ", "dmesg ", "openssl ", "ps ", "df -h runs/")
_CALLS_SHARDS = r"^weightserver (health|checkpoints|rollback|release|backup) .*"


@dataclass(frozen=True)
class Form:
    """What the commands become where shards are containers: `{}` is a shard's number."""

    inside: str
    """Runs a command in a shard's container, which has the image's programs, certificates and data."""
    shard: str
    """A shard's name for the others."""
    trainer: str
    """Runs a command in the trainer's container."""
    prometheus: str
    """Runs a command where Prometheus answers at 127.0.0.1:9090, or nothing."""

    def of(self, command: str) -> str:
        """The command in this form; as it is if it looks at the machine."""
        if command.startswith("promtool "):
            return self.prometheus + command
        if command.startswith(ON_THE_MACHINE):
            return command
        numbers = [int(digit) - 1 for digit in re.findall(r"127\.0\.0\.1:(?:5005|910)(\d)", command)]
        inside = self.inside.format(numbers[0] if numbers else 0)
        command = re.sub(r"^curl -s(?: -m \d+)? 127\.0\.0\.1:9200", "health.sh 127.0.0.1 9200 ", command)
        if command.startswith("health.sh 127.0.0.1 9200"):
            return self.trainer + command
        command = re.sub(r"^curl -s(?: -m \d+)? 127\.0\.0\.1:910\d", "health.sh 127.0.0.1 9101 ", command)
        command = command.replace("/data/ws0", "/data/shard")
        for number in numbers:
            name = "127.0.0.1" if len(numbers) == 1 else self.shard.format(number)
            command = command.replace(f"127.0.0.1:5005{number + 1}", f"{name}:50051")
            command = command.replace(f"127.0.0.1:910{number + 1}", f"{name}:9101")
        return inside + with_security(command, ["--tls-ca /certs/ca.pem", "--token-file /certs/token"])


FORMS = {
    "compose": Form(
        "docker compose exec -T shard-{} ",
        "shard-{}",
        "docker compose exec -T trainer ",
        "docker compose exec -T prometheus ",
    ),
    "kubectl": Form(
        "kubectl exec weightserver-{} -- ", "weightserver-{}.weightserver", "kubectl exec job/trainer-first-0 -- ", ""
    ),
}


def with_security(command: str, options: Sequence[str]) -> str:
    """The command with options by which it authenticates itself, if it calls shards."""
    wanted = [option for option in options if not ("token" in option and " health " in f" {command} ")]
    return " ".join([command, *wanted]) if re.match(_CALLS_SHARDS, command) else command


@dataclass(frozen=True)
class Done:
    """A command that was run."""

    command: str
    status: int | None
    """Exit status; None if it did not end in time."""
    seconds: float
    output: str
    errors: str


def run(command: str, here: dict[str, str], *, security: Sequence[str] = (), seconds: float = 30) -> Done:
    """Runs a command as an operator pastes it.

    Args:
        here: what the runbook names, and what it is called here.
        security: options with which shards are called.
        seconds: the time limit.
    """
    pasted = with_security(command, security)
    for said, found in here.items():
        pasted = pasted.replace(said, found)
    pasted = re.sub(r"^weightserver ", f"{sys.executable} -m weightserver ", pasted)
    started = time.monotonic()
    try:
        done = subprocess.run(["bash", "-c", pasted], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Done(command, None, seconds, "", "")
    return Done(command, done.returncode, time.monotonic() - started, done.stdout, done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="deploy.runbook", description="Prints the runbook's commands for containers.")
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("alerts", nargs="*", metavar="ALERT", help="sections of the runbook, by default all")
    arguments = parser.parse_args()
    if unknown := set(arguments.alerts) - set(COMMANDS):
        parser.error(f"docs/runbook.md has no section {', '.join(sorted(unknown))}")
    for alert in arguments.alerts or COMMANDS:
        print(f"## {alert}")
        for command in COMMANDS[alert]:
            print(FORMS[arguments.form].of(command))


if __name__ == "__main__":
    main()
