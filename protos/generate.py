"""Regenerates weightserver/protocol/_generated from the protos: python protos/generate.py [OUTPUT_DIRECTORY]."""

from __future__ import annotations

import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).parent
PROTO = PROTOS / "pic/weightserver/v1/weight_server.proto"
GENERATED = PROTOS.parent / "weightserver/protocol/_generated"


def generate(output: Path) -> None:
    """Writes the modules of the messages to `output`."""
    with tempfile.TemporaryDirectory() as directory:
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                f"--proto_path={resources.files('grpc_tools') / '_proto'}",
                f"--python_out={directory}",
                f"--pyi_out={directory}",
                str(PROTO),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        for path in Path(directory, PROTO.parent.relative_to(PROTOS)).iterdir():
            shutil.copyfile(path, output / path.name)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else GENERATED)
