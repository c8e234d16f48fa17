"""Builds the images and checks their contents."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote, urlparse

from deploy.bring_up.engine import Docker
from deploy.bring_up.report import check, say
from deploy.bring_up.settings import ROOT
from weightserver.common.version import __version__

STAND_IN = "pic-stand-in-base:bookworm"

WEIGHTSERVER_IMAGE = f"pic-weightserver:{__version__}"


def base_image(docker: Docker, wanted: str) -> str:
    """The image to build from: `wanted`, or a stand-in with the same Python if that cannot be pulled."""
    if docker.has(STAND_IN):
        say("using the stand-in for the base image that already exists")
    elif docker.has(wanted) or docker.pulls(wanted):
        return wanted
    else:
        say(f"{wanted} cannot be pulled: making a stand-in from Debian's packages")
        with tempfile.TemporaryDirectory() as directory:
            packages = "--include=python3,python3-dev,python3-venv,ca-certificates,g++,tini"
            subprocess.run(
                ["debootstrap", "--variant=minbase", packages, "bookworm", f"{directory}/root"],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=600,
            )
            subprocess.run(["tar", "-C", f"{directory}/root", "-cf", f"{directory}/root.tar", "."], check=True)
            docker.run("import", f"{directory}/root.tar", STAND_IN)
    return STAND_IN


class _QuietFiles(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def pip_secrets(directory: Path) -> Iterator[list[str]]:
    """Yields options of `docker build` with this machine's pip settings; serves pip's local folders meanwhile."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(re.findall(r"(?m)^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout))
    lines, options = ["[global]"], []
    with ExitStack() as stack:

        def reachable(place: str) -> str:
            if urlparse(place).scheme not in ("", "file"):
                return place
            path = Path(unquote(urlparse(place).path))
            handler = functools.partial(_QuietFiles, directory=str(path.parent))  # an index links to sibling folders
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/{path.name}/"

        for name in ("index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "timeout"):
            if value := settings.get(name):
                places = value.replace("\\n", " ").split()
                is_place = name in ("extra-index-url", "find-links", "index-url")
                lines.append(f"{name} = {' '.join(map(reachable, places)) if is_place else value}")
        if certificates := settings.get("cert"):
            lines.append("cert = /run/secrets/pip-ca")
            options += ["--secret", f"id=pip-ca,src={certificates}"]
        (directory / "pip.conf").write_text("\n".join(lines) + "\n")
        yield ["--secret", f"id=pip,src={directory}/pip.conf", *options]


def build(docker: Docker, name: str, base: str, secrets: Sequence[str]) -> None:
    """Builds with hashes, except the trainer's image: this machine's index may have another torch."""
    begun = time.monotonic()
    without_hashes = "REQUIREMENTS=-c constraints.txt setuptools .[trainer,parquet,s3,otel]"
    docker.run(
        *("build", "--network", "host", "--build-arg", f"BASE_IMAGE={base}", *secrets),
        *(("--build-arg", without_hashes) if name == "trainer" else ()),
        *("-f", str(ROOT / f"deploy/{name}.Dockerfile"), "-t", f"pic-{name}:{__version__}", str(ROOT)),
        seconds=1800,
    )
    size = int(docker.run("image", "inspect", "-f", "{{.Size}}", f"pic-{name}:{__version__}"))
    say(f"pic-{name}:{__version__}: {size / 1e6:.0f} MB in {time.monotonic() - begun:.0f} s")


def look_into_images(docker: Docker) -> None:
    """Checks the user, torch and secrets in the images."""

    def inside(image: str, script: str) -> str:
        return docker.run("run", "--rm", "--entrypoint", "sh", image, "-c", script, fails=True).strip()

    for name in ("weightserver", "trainer"):
        image = f"pic-{name}:{__version__}"
        user, secrets, torch = inside(
            image,
            "id -u; ls -d /etc/pip.conf /run/secrets 2>/dev/null | wc -l; "
            "python -c 'import importlib.util as u; print(u.find_spec(\"torch\") is not None)'",
        ).splitlines()
        history = docker.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
        say(f"{image}: user {user}, torch {torch}, {secrets} of pip's secrets")
        check(user == "10001", f"{image} runs as user {user}")
        check(torch == str(name == "trainer"), f"{image}: torch {torch}")
        check(secrets == "0" and "secrets" not in history, f"{image} holds pip's settings")
