"""Names and numbers that all parts of the bring-up share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
COMPOSE_FILE = ROOT / "deploy/docker-compose.yml"
PROJECT = "pic-bring-up"
LISTEN = "127.94.0.1"
"""A loopback address on which no other shards listen."""
RANKS, EPOCHS, CHECKPOINT_EVERY = 2, 0.6, 50
Json = dict[str, Any]
