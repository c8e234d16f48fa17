"""From a tree of images to an encoder in another library, by command lines as users type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.image_tree import plain_tree
from tests.helpers.small_run import losses
from tests.helpers.watching import wait_until
from trainer.model import load_encoder
from trainer.torchvision_schemas import import_module

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TRAINER = "-m torch.distributed.run --standalone --nproc-per-node 2 -m trainer imagenet-1k --resume auto --steps 36 "
TRAINER += "--checkpoint-every 12 --log-every 1 --batch-size 8 --num-negatives 32 --window-size 48 --window-stride 16 "
TRAINER += "--dim 16 --precision float32 --encoder.name resnet18 --encoder.image-size 32 --evaluate"


def python(*words: str) -> str:
    """Runs `python WORDS`, which must succeed; returns its output."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_images_to_an_encoder_elsewhere(tmp_path: Path) -> None:
    packed, output, exported = tmp_path / "packed", tmp_path / "run", tmp_path / "exported"
    for name, directory, num_images in (("train", packed, 96), ("val", packed / "test", 30)):
        images = plain_tree(tmp_path / name, num_images, first=len(name) * 1000)
        assert f"{num_images} images" in python("-m", "trainer.data", "pack", str(images), str(directory))

    run = [*TRAINER.split(), "--data-dir", str(packed), "--output", str(output)]
    lines = output / "metrics.jsonl"
    with subprocess.Popen([sys.executable, *run], stderr=subprocess.DEVNULL, env=ENVIRONMENT) as torchrun:
        wait_until(lambda: lines.exists() and lines.read_text().count("\n") >= 16, seconds=120)
        for process in [*psutil.Process(torchrun.pid).children(recursive=True), torchrun]:  # ranks and shards
            process.kill()
    before = losses(output)
    assert 16 <= len(before) < 36, "it was killed in the midst"
    python(*run)
    assert losses(output)[: len(before)] == before, "steps after the checkpoint were repeated with other results"
    assert len(losses(output)) == 36

    python("-m", "trainer.export", "encoder", str(output), "--format", "timm", "--output", str(exported))
    (weights,) = exported.glob("resnet18-timm-*.safetensors")
    theirs = import_module("timm").create_model("resnet18", num_classes=0).eval()
    theirs.load_state_dict(load_file(weights))
    ours, pictures = load_encoder(output / "encoder.safetensors")[0].eval(), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(theirs(pictures), ours(pictures))

    told = json.loads(python("-m", "trainer.evaluate", "knn", "--run", str(output)))
    summary = json.loads((output / "summary.json").read_text())
    assert (told["protocol"], told["top1"]) == ("knn", summary["knn_top1"])
