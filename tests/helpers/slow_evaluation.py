"""A cell whose evaluation takes a minute, and says when it begins: python -m tests.helpers.slow_evaluation DIRECTORY"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from experiments import run_cell

BEGUN_FILE = "evaluating"


def _evaluate(*_: Any) -> dict[str, Any]:
    Path(sys.argv[1], BEGUN_FILE).touch()
    time.sleep(60)
    return {}


if __name__ == "__main__":
    run_cell.evaluate_features = _evaluate  # type: ignore[assignment,attr-defined]
    sys.exit(run_cell.main())
