"""Shards with something wrong: what they say, that they recover, and that the runbook's commands work meanwhile."""

from __future__ import annotations

import re

from deploy.bring_up.engine import Docker
from deploy.bring_up.images import WEIGHTSERVER_IMAGE
from deploy.bring_up.report import check, say, wait_until
from deploy.bring_up.settings import PROJECT, Json
from deploy.runbook import COMMANDS, FORMS, MAY_BE_DOWN

# ---- bad input


def _volume(docker: Docker, name: str, *files: str) -> str:
    """Creates a volume with some of the shards' certificates."""
    script = f"cp {' '.join(f'/certs/shards/{file}' for file in files)} /certs/clients/"
    mounts = ("-v", f"{PROJECT}_shard-certificates:/certs/shards:ro", "-v", f"{PROJECT}_{name}:/certs/clients")
    docker.run("run", "--rm", *mounts, "--entrypoint", "sh", WEIGHTSERVER_IMAGE, "-c", script)
    return name


def _memory_volume(size: str) -> Json:
    options = f"size={size},uid=10001,gid=10001,mode=0700"
    return {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}


def show_faults(docker: Docker) -> None:
    """Starts shard 0 with one thing wrong at a time; the engine restarts it again and again."""
    certificates = "shard-certificates:/certs:ro"
    without_token = _volume(docker, "without-token", "ca.pem", "server.pem", "server-key.pem")
    without_certificate = _volume(docker, "without-certificate", "ca.pem", "token", "server-key.pem")
    cases: dict[str, tuple[Json, str]] = {
        "the volume of another shard": (
            {"volumes": ["shard-1:/data", certificates]},
            r"/data/shard holds shard 1 of 2, not shard 0 of 2",
        ),
        "another number of shards": (
            {"command": ["--shard=0", "--num-shards=3"]},
            r"/data/shard holds shard 0 of 2, not shard 0 of 3",
        ),
        "a shard beyond the number": ({"command": ["--shard=2"]}, r"--shard must lie in"),
        "no token": (
            {"volumes": ["shard-0:/data", f"{without_token}:/certs:ro"]},
            r"--token-file /certs/token cannot be read",
        ),
        "no certificate": (
            {"volumes": ["shard-0:/data", f"{without_certificate}:/certs:ro"]},
            r"--tls-cert /certs/server.pem cannot be read",
        ),
        "an empty volume": ({"volumes": ["empty:/data", certificates]}, r"/data/shard is missing: is its disk mounted"),
        "no room on the volume": (
            {"volumes": ["full:/data", certificates], "command": ["--shard=0", "--init"]},
            r"No space left on device",
        ),
    }
    volumes = {"full": _memory_volume("4k"), "small": _memory_volume("300m")}
    volumes |= {name: {} for name in ("empty", without_token, without_certificate)}
    for what, (service, wanted) in cases.items():
        override = {"services": {"shard-0": service}, "volumes": volumes}
        docker.up("up", "-d", "--no-deps", "shard-0", override=override)
        status = wait_until(lambda: docker.failed("shard-0"), f"{what}: the shard fails")
        line = docker.last_line("shard-0")
        say(f"{what}: exit status {status}\n    {line}")
        check(re.search(wanted, line), f"{what}: the last line is {line!r}")
        docker.up("rm", "-sf", "shard-0", override=override)
    _fill_volume(docker, {"services": {"shard-0": {"volumes": ["small:/data", certificates]}}, "volumes": volumes})


def _fill_volume(docker: Docker, override: Json) -> None:
    """Fills the volume of a shard that serves, and makes room again."""
    docker.up("up", "-d", "--no-deps", "shard-0", override=override, init=True)
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard on a small volume is healthy")
    docker.up("exec", "-T", "shard-0", "sh", "-c", "dd if=/dev/zero of=/data/other bs=1M 2>/dev/null", fails=True)
    wait_until(lambda: docker.health("shard-0") == "unhealthy", "a shard on a full volume is unhealthy")
    reason = docker.inspect("shard-0")["State"]["Health"]["Log"][-1]["Output"].strip()
    say(f"a volume that fills up: unhealthy\n    {reason}")
    check("nearly full" in reason, f"the health check says {reason!r}")
    docker.up("exec", "-T", "shard-0", "rm", "/data/other")
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard with free space again is healthy")
    say("free space again: healthy")
    docker.up("rm", "-sf", "shard-0", override=override)


# ---- the runbook


def show_runbook(docker: Docker) -> None:
    """Runs the runbook's commands that ask shards, in the state in which their alerts fire."""
    while_down: dict[str, int] = {}
    while_up: dict[str, int] = {}
    for alert, commands in COMMANDS.items():
        for command, status in commands.items():
            made = FORMS["compose"].of(command, alert)
            if " shard-0 " in made and alert != "FetchStuck":
                is_down = (alert in MAY_BE_DOWN and "/healthz" not in made) or " verify " in made
                (while_down if is_down else while_up)[made] = status
    _paste(docker, while_up)
    docker.up("stop", "shard-0")
    _paste(docker, while_down)
    docker.up("start", "shard-0")
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard that was started again is healthy")


def _paste(docker: Docker, commands: dict[str, int]) -> None:
    for command, expected in commands.items():
        status, output = docker.paste(command)
        say(f"status {status}: {command}")
        check(status == expected, f"{command} ended with {status}:\n{output}")


def show_hang(docker: Docker) -> None:
    """Stops a shard's process as a debugger does: its health check kills it, and the engine starts it again."""
    began = docker.inspect("shard-0")["State"]["StartedAt"]

    def is_new() -> bool:
        return bool(docker.inspect("shard-0")["State"]["StartedAt"] != began)

    shard = "grep -lsxz [-]-metrics-port=9101 /proc/[0-9]*/cmdline | cut -d/ -f3"
    docker.up("exec", "-T", "shard-0", "sh", "-c", f"kill -STOP $({shard})")
    wait_until(is_new, "a shard that hangs is started again", seconds=400)
    wait_until(lambda: docker.health("shard-0") == "healthy", "a shard that hung is healthy")
    say("a shard that hangs: killed by its health check, and healthy again")
