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
    section.partition("\n")[0]: {
        command: int(status or 0)
        for command, status in re.findall(r"^    (\S.*?)(?: +# status (\d+): .*)?$", section, re.MULTILINE)
    }
    for section in RUNBOOK.read_text().split("\n## ")[1:]
}
"""Name of each section, and its commands with the exit status that each has while the alert fires."""
CHANGES_OR_NEEDS_MORE = ("pic train ", "weightserver verify ", "iostat ", "dmesg ", "ps ", "df -h runs/")
"""Commands that resume a run, need a stopped shard, or look at a machine that a test does not have."""
ON_THE_MACHINE = ("iostat ", "dmesg ", "ps ")
MAY_BE_DOWN = ("ShardDown", "ShardMissing", "DatabaseDamaged")
"""Alerts of shards whose containers may not run."""
_CALLS_SHARDS = r"^weightserver (health|checkpoints|rollback|release|backup) .*"


@dataclass(frozen=True)
class Form:
    """What the commands become where shards are containers: `{}` is a shard's number."""

    inside: str
    """Runs a command in the container of a shard that runs, which has the image's programs, certificates and data."""
    aside: str
    """Runs a command in a container with a shard's data that does not need the shard."""
    calling: str
    """Runs a command that calls shards, whichever of them are down."""
    stop: str
    """Stops a shard."""
    shard: str
    """A shard's name for the others."""
    trainer: str
    """Runs a command in the trainer's container."""
    resume: str
    """Starts the trainer again."""
    prometheus: str
    """Runs a command where Prometheus answers at 127.0.0.1:9090, or nothing."""

    def of(self, command: str, alert: str) -> str:
        """The command in this form while an alert fires; as it is if it looks at the machine."""
        program, first, *_ = command.split()
        if program == "promtool":
            return self.prometheus + command
        if program == "pic":
            return self.resume
        if command.startswith(ON_THE_MACHINE):
            return command
        command = command.replace("/data/ws0", "/data/shard").replace(" certs/", " /certs/").replace("runs/a", "/runs")
        command = re.sub(r"^curl -s(?: -m \d+)? 127\.0\.0\.1:(?:9200|(910)\d)", _probe, command)
        if " 9200 " in command or "/runs" in command:
            return self.trainer + command
        numbers = [int(digit) - 1 for digit in re.findall(r"127\.0\.0\.1:(?:5005|910)(\d)", command)]
        if numbers:
            for number in numbers:
                name = self.shard.format(number)
                command = command.replace(f"127.0.0.1:5005{number + 1}", f"{name}:50051")
                command = command.replace(f"127.0.0.1:910{number + 1}", f"{name}:9101")
            return self.calling + with_security(command, ["--tls-ca /certs/ca.pem", "--token-file /certs/token"])
        if first == "verify":
            return f"{self.stop.format(0)} && {self.aside.format(0)}{command}"
        return (self.aside if alert in MAY_BE_DOWN and "health.sh" not in command else self.inside).format(0) + command


def _probe(asked: re.Match[str]) -> str:
    """What the images have in place of curl."""
    return f"health.sh 127.0.0.1 {9101 if asked[1] else 9200} "


FORMS = {
    "compose": Form(
        inside="docker compose exec -T shard-{} ",
        aside="docker compose run --rm --no-deps -T --entrypoint env shard-{} ",
        calling="docker compose run --rm --no-deps -T --entrypoint env shard-0 ",
        stop="docker compose stop shard-{}",
        shard="shard-{}",
        trainer="docker compose exec -T trainer ",
        resume="docker compose --profile trainer up -d --no-deps trainer",
        prometheus="docker compose exec -T prometheus ",
    ),
    "kubectl": Form(
        inside="kubectl exec weightserver-{} -- ",
        aside="kubectl exec weightserver-tools -- ",
        calling="kubectl exec service/weightserver -- ",
        stop="kubectl scale statefulset/weightserver --replicas 0 && kubectl wait --for=delete --timeout=90s "
        "pod/weightserver-{}",
        shard="weightserver-{}.weightserver.default.svc",
        trainer="kubectl exec job/trainer-first-0 -- ",
        resume="kubectl delete jobset trainer --ignore-not-found && kubectl apply -k deploy/kubernetes/overlays/small",
        prometheus="",
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
    expected: int
    """The exit status that it must have."""
    status: int | None
    """The exit status; None if it did not end in time."""
    seconds: float
    output: str
    errors: str


def run(
    command: str, here: dict[str, str], *, expected: int = 0, security: Sequence[str] = (), seconds: float = 30
) -> Done:
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
        return Done(command, expected, None, seconds, "", "")
    return Done(command, expected, done.returncode, time.monotonic() - started, done.stdout, done.stderr)


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
            print(FORMS[arguments.form].of(command, alert))


if __name__ == "__main__":
    main()
