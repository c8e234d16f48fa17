"""What every command of the trainer does with its arguments before it begins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weightserver.common.logs import asked_format, log_events


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments, by default those of the process, and logs from now on in the format that they ask for."""
    given = sys.argv[1:] if arguments is None else arguments
    log_events(asked_format(given))
    return parser.parse_args(given)
