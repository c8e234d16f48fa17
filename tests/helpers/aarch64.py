"""A folder with Debian's Python for aarch64 and this project's dependencies, to be run by qemu-aarch64.

Nothing is installed on the machine: apt's and dpkg's own files stay as they are, and no root is needed. As a script:
python tests/helpers/aarch64.py FOLDER
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = [f"--platform=manylinux_2_{number}_aarch64" for number in (17, 27, 28)] + ["--platform=manylinux2014_aarch64"]
PACKAGES = (
    "libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libcrypt1 "
    "lib{python}-minimal lib{python}-stdlib {python}-minimal"
)


class Aarch64:
    """Runs scripts of this project as an aarch64 machine would."""

    def __init__(self, folder: Path) -> None:
        """Fills the folder.

        Raises:
            subprocess.CalledProcessError: Debian's or Python's packages cannot be had; stderr says why.
        """
        self._root, self._packages, state = folder / "root", folder / "site-packages", folder / "apt"
        for path in (state / "lists/partial", state / "archives/partial", self._root, self._packages):
            path.mkdir(parents=True)
        apt = [
            *("-o", "APT::Architecture=arm64", "-o", "APT::Architectures=arm64", "-o", "APT::Sandbox::User="),
            *("-o", "Dir::State::status=/dev/null", "-o", f"Dir::State::lists={state / 'lists'}"),
            *("-o", f"Dir::Cache={state}"),
        ]
        _run(["apt-get", *apt, "-qq", "update"], state)
        depends = _run(["apt-cache", *apt, "depends", "python3-minimal"], state)
        python = re.findall(r"(python3\.\d+)-minimal", depends)[0]
        _run(["apt-get", *apt, "-qq", "download", *PACKAGES.format(python=python).split()], state)
        for package in state.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(package), str(self._root)], state)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        target = ["--target", str(self._packages), "--only-binary=:all:", *WHEELS]
        version = ["--python-version", python.removeprefix("python")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        _run([*pip, *target, *version, "-c", str(ROOT / "constraints.txt"), *project["dependencies"]], state)
        self._python = self._root / "usr/bin" / python

    def run(self, script: Path, *, processor: str) -> str:
        """Returns what the script prints. `qemu-aarch64 -cpu help` lists the processors."""
        environment = {"PYTHONPATH": f"{self._packages}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        # The packages `trainer` and `weightserver.torch` ask for torch, which is not there; the modules that the script
        # uses do without.
        begin = (
            "import runpy, sys, types\n"
            "for name in ('trainer', 'weightserver.torch'):\n"
            "    package = sys.modules[name] = types.ModuleType(name)\n"
            f"    package.__path__ = [{str(ROOT)!r} + '/' + name.replace('.', '/')]\n"
            "import weightserver.torch.windows as windows\n"
            "package.__dict__.update({name: found for name, found in vars(windows).items() if name[0] != '_'})\n"
            f"runpy.run_path({str(script)!r}, run_name='__main__')"
        )
        command = ["qemu-aarch64", "-cpu", processor, "-L", str(self._root), str(self._python), "-c", begin]
        return _run(command, self._root, **environment)


def _run(command: list[str], folder: Path, **environment: str) -> str:
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=280
    ).stdout


if __name__ == "__main__":
    machine = Aarch64(Path(sys.argv[1]).resolve())
    print(machine.run(ROOT / "tests/helpers/arithmetic.py", processor="max"))
