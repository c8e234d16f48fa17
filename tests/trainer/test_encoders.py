"""Encoders for other libraries: each export is loaded as its model card says, and gives the same features."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from tests.helpers.small_run import EVERY, small_run
from trainer.data import load_dataset
from trainer.data.decode import decoded_side
from trainer.data.pixels import IMAGENET, normalise
from trainer.evaluate.encoders import encoder_of
from trainer.evaluate.options import EncoderOptions
from trainer.export.__main__ import main
from trainer.loop import train
from trainer.model import EncoderConfig, build_encoder, load_encoder, save_encoder
from trainer.run.directory import is_run
from trainer.torchvision_schemas import import_module
from weightserver.common.atomic_files import sha256
from weightserver.common.installing import install_advice

SIDE = 28
RESULTS = {"steps": 40, "loss": 1.25, "mean_loss": 1.375, "knn_top1": 87.75, "warnings": ["the loss"], "parts": 1}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    import_module("torchvision")  # so that a card's imports work with a CPU-only torch too


def export(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["encoder", *map(str, arguments)])
    return stopped.value.code


def a_run(path: Path, name: str, in_channels: int = 3) -> Path:
    """A run's files; its encoder, a name and options, has weights and statistics unlike any library's initial ones."""
    name, *options = name.split()
    mean, std = IMAGENET if in_channels == 3 else ((0.286,), (0.353,))
    config = EncoderConfig(name=name, in_channels=in_channels, image_size=SIDE, pixel_mean=mean, pixel_std=std)
    config = replace(config, options=tuple(options))
    torch.manual_seed(1)
    encoder = build_encoder(config)
    for module in encoder.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.2, 0.6)  # also where residual blocks start at 0
            torch.nn.init.normal_(module.bias, std=0.1)
    encoder(normalise(images(40))[:, :in_channels])
    path.mkdir()
    save_encoder(encoder, config, path / "encoder.safetensors")
    settings = small_run(path, encoder=config)
    (path / "config.json").write_text(settings.to_json())
    (path / "summary.json").write_text(json.dumps(RESULTS))
    return path


@cache
def images(count: int = 6) -> Tensor:
    return load_dataset("fashion-mnist").test_images[:count].expand(-1, 3, -1, -1)


def features(run: Path, views: Tensor) -> Tensor:
    encoder, config = load_encoder(run / "encoder.safetensors")
    with torch.no_grad():
        result: Tensor = encoder(views[:, : config.in_channels])
    return result


def names_of_the_card(directory: Path) -> dict[str, Any]:
    """Runs the card's code in its directory."""
    names = dict[str, Any]()
    with contextlib.chdir(directory):
        exec(code_of_the_card(directory), names)
    return names


def code_of_the_card(directory: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    assert not re.search(r"\b(trainer|weightserver)\b", code), "its library alone loads the encoder"
    assert len(re.findall(r"^model", code, re.MULTILINE)) <= 4, "a few lines load it"
    return str(code)


def in_a_fresh_process(directory: Path, after: str, views: Tensor) -> Tensor:
    """The features that the card's code, and then `after`, give of `images`, in a process that can import neither the
    trainer nor the weight server."""
    np.save(directory / "images.npy", views.numpy())
    # so that timm and torchvision can be imported with a CPU-only torch
    schemas = Path(__file__).parents[2] / "trainer/torchvision_schemas.py"
    before = f"import runpy, sys, numpy as np, torch; torch.set_num_threads(1); schemas = {str(schemas)!r}\n"
    before += "kept = runpy.run_path(schemas)['declare_missing_schemas']()\n"
    before += "sys.modules |= dict.fromkeys(('trainer', 'weightserver'))\n"  # importing them fails
    before += "images = np.load('images.npy')\n"
    program = f"{before}{code_of_the_card(directory)}\n{after}\nnp.save('features.npy', features)"
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True, timeout=120)
    return torch.from_numpy(np.load(directory / "features.npy"))


@pytest.mark.parametrize(
    ("name", "in_channels", "library"),
    [
        ("resnet18", 3, "torchvision"),
        ("resnet18", 1, "timm"),
        ("mobilenet_v2 width_mult=0.5", 3, "torchvision"),
        ("timm:resnet10t act_layer=silu stem_width=16", 3, "timm"),
        *(
            pytest.param(*case, marks=pytest.mark.guard)
            for case in [
                ("torchvision:resnet50", 3, "timm"),
                ("torchvision:mobilenet_v3_small", 3, "torchvision"),
                ("timm:resnet50", 3, "torchvision"),
                ("timm:resnet18.a1_in1k", 3, "torchvision"),
                ("timm:resnet10t", 1, "timm"),
                ("timm:resnet18 drop_path_rate=0.1", 3, "torchvision"),
                ("resnet18 zero_init_residual=False", 3, "timm"),
            ]
        ),
    ],
)
def test_the_library_gives_the_same_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, in_channels: int, library: str
) -> None:
    run = a_run(tmp_path / "run", name, in_channels)
    assert export(run, "--format", library, "--output", tmp_path / "out") == 0
    assert capsys.readouterr().out == f"wrote {4 if library == 'timm' else 3} files to {tmp_path / 'out'}\n"
    model = names_of_the_card(tmp_path / "out")["model"]
    views = normalise(images())
    views = views[:, :1].expand(-1, 3, -1, -1) if in_channels == 1 else views
    expected = features(run, views)
    with torch.no_grad():
        found = model(views[:, :1] if name.startswith("timm:") and in_channels == 1 else views)
    assert expected.std() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    again, config = load_encoder(file)  # an encoder file too
    with torch.no_grad():
        found = again(views[:, : config.in_channels])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    own = load_encoder(run / "encoder.safetensors")[1]
    assert config == own, "of the run's images: grey ones stay grey"


def test_a_library_alone_loads_an_encoder(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run", "small", in_channels=1), tmp_path / "out"
    assert export(run, "--format", "timm", "--output", out) == 0
    views = normalise(images())[:, :1].contiguous()
    found = in_a_fresh_process(out, "features = model(torch.from_numpy(images)).detach().numpy()", views)
    torch.testing.assert_close(found, features(run, views), rtol=1e-5, atol=1e-5)
    (again,) = out.glob("*.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(load_encoder(again)[0](views), features(run, views), rtol=0, atol=0)


@pytest.mark.guard
@pytest.mark.parametrize("name", ["small", "resnet18", "timm:resnet10t"])
def test_an_onnx_graph_gives_the_same_features(tmp_path: Path, name: str) -> None:
    for needed in ("onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    run, out = a_run(tmp_path / "run", name), tmp_path / "out"
    assert export(run, "--format", "onnx", "--output", out) == 0
    views = normalise(images(5))
    found = in_a_fresh_process(out, "", views)
    torch.testing.assert_close(found, features(run, views), rtol=1e-5, atol=1e-5)


def test_onnx_without_its_extra_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.export.encoders.find_spec", lambda name: None)
    assert export(a_run(tmp_path / "run", "small"), "--format", "onnx", "--output", tmp_path / "out") == 1
    assert f"needs the extra of that name: {install_advice('onnx')}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "in_channels", "library", "dataset"),
    [
        ("resnet18", 3, "torchvision", "cifar-10"),
        ("timm:resnet18", 3, "timm", "cifar-10"),
        pytest.param("resnet18", 1, "torchvision", "folder", marks=pytest.mark.guard),
        pytest.param("resnet18", 3, "timm", "folder", marks=pytest.mark.guard),
        pytest.param("timm:resnet18", 1, "timm", "packed", marks=pytest.mark.guard),
    ],
)
def test_the_libraries_scale_pixels_as_the_encoder_was_trained(
    tmp_path: Path, name: str, in_channels: int, library: str, dataset: str
) -> None:
    """The card's preprocessing of a picture equals that of evaluation, which takes whole images of CIFAR-10."""
    run, out = a_run(tmp_path / "run", name, in_channels), tmp_path / "out"
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"dataset": dataset}))
    assert export(run, "--format", library, "--output", out) == 0
    pixels = images()[0].permute(1, 2, 0).numpy()
    side = SIDE if dataset == "cifar-10" else decoded_side(SIDE)
    picture = Image.fromarray(pixels).resize((side, side))
    seen = names_of_the_card(out)["preprocess"](
        picture if library == "torchvision" or in_channels == 3 else picture.convert("L")
    )
    edge = (side - SIDE) // 2
    squares = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None, :, edge : edge + SIDE, edge : edge + SIDE]
    config = load_encoder(run / "encoder.safetensors")[1]
    expected = normalise(squares, config.pixels)[0, : len(seen)]
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-5)


def test_the_files_have_a_hash_and_a_card(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run", "resnet18"), tmp_path / "out"
    assert export(run, "--format", "timm", "--output", out, "--licence", "cc-by-4.0") == 0
    (weights,) = out.glob("*.safetensors")
    digest = sha256(weights)
    assert weights.name == f"resnet18-timm-{digest[:8]}.safetensors"
    assert (out / f"resnet18-timm-{digest[:8]}.sha256").read_text() == f"{digest}  {weights.name}\n"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-4.0\nlibrary_name: timm\n")
    for line in (
        "| accuracy of kNN, top-1 | 87.75 % |",
        "| loss at the end, mean of the last tenth of the run | 1.375 |",
        "| batch_size | 16 |",
        "| encoder.name | resnet18 |",
        digest,
        "synthetic",
    ):
        assert line in card
    assert "--pixel-range" not in card
    assert str(tmp_path) not in card  # the card must not reveal the directory
    assert "| output |" not in card
    assert "warnings" not in card
    assert "without using labels" in card
    assert "self-supervised" in card
    assert "encoder.width" not in card, "resnet18 has none"
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"labels": "classes"}))
    assert export(run, "--format", "timm", "--output", tmp_path / "labelled") == 0
    card = (tmp_path / "labelled/README.md").read_text()
    assert "with their labels" in card
    encoders = [encoder_of(EncoderOptions(encoder=tmp_path / name)) for name in ("out", "labelled")]
    assert [encoder.knows_labels for encoder in encoders] == [False, True]
    assert not re.search("without using|self-supervised|instance classification$|its own class", card, re.MULTILINE)


@pytest.mark.parametrize("name", ["small", "resnet18"])
def test_an_export_says_how_its_run_read_pixels(tmp_path: Path, name: str) -> None:
    run, out = a_run(tmp_path / "run", name), tmp_path / "out"
    settings = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(settings | {"pixel_range": [0.0, 4095.0], "alpha": "ignore"}))
    assert export(run, "--format", "timm", "--output", out) == 0
    card = (out / "README.md").read_text()
    assert "Of pixels of more than 8 bits, 0 was read as 0 and 4095 as 1 (--pixel-range)." in card
    assert "A fourth channel was left out (--alpha ignore)." in card
    with safe_open(next(out.glob("*.safetensors")), "pt") as file:
        metadata = file.metadata()
    assert (json.loads(metadata["pixel_range"]), json.loads(metadata["alpha"])) == ([0, 4095], "ignore")
    images = encoder_of(EncoderOptions(encoder=out)).images
    assert (images.pixel_range, images.alpha) == ((0, 4095), "ignore")
    assert (is_run(run), is_run(out)) == (True, False), "both have a config.json"


@pytest.mark.guard
def test_a_checkpoint_of_a_run_that_has_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    config = EncoderConfig(name="resnet18", in_channels=3, image_size=16)
    final = train(small_run(run, steps=EVERY + 2, encoder=config, num_shards=1)).model.encoder.eval()
    final = final.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # the same sums in the same order
    step = f"step-{EVERY:012d}"
    assert export(run, "--format", "torchvision", "--output", tmp_path / "kept", "--checkpoint", step) == 0
    assert export(run, "--format", "torchvision", "--output", tmp_path / "end") == 0
    views = normalise(images())[..., :16, :16]
    with torch.no_grad():
        kept, end = (names_of_the_card(tmp_path / name)["model"](views) for name in ("kept", "end"))
        torch.testing.assert_close(end, final(views), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(kept, end, atol=1e-3)
    assert f"checkpoint {step} of a run, not evaluated" in (tmp_path / "kept/README.md").read_text()
    (run / "encoder.safetensors").unlink()
    assert export(run, "--format", "timm", "--output", tmp_path / "no") == 1
    newest = f"step-{EVERY + 2:012d}"
    assert f"has not ended and has no encoder.safetensors: give --checkpoint {newest}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "in_channels", "library", "message"),
    [
        ("small", 3, "torchvision", "torchvision has no model like the encoder 'small': choose timm or onnx"),
        ("none", 3, "onnx", "encoder 'none' learns nothing: there is no encoder to export"),
        ("timm:resnet10t", 3, "torchvision", "torchvision has no counterpart of 'timm:resnet10t'"),
        ("mobilenet_v3_small", 3, "timm", "timm has no counterpart of 'mobilenet_v3_small'"),
        ("timm:resnet18", 1, "torchvision", "takes colour images, but this encoder grey ones"),
        ("efficientnet_b0", 3, "timm", "its model of that name has other parts"),
    ],
)
def test_what_a_library_does_not_have_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, in_channels: int, library: str, message: str
) -> None:
    run = a_run(tmp_path / "run", name, in_channels)
    assert export(run, "--format", library, "--output", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_bad_input_gives_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = a_run(tmp_path / "run", "resnet18"), tmp_path / "out"

    def fails(message: str, *arguments: object) -> None:
        assert export(*arguments, "--format", "timm", "--output", out) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    fails("holds no run", tmp_path / "none")
    fails("has no checkpoint 'step-7': it has none", run, "--checkpoint", "step-7")
    out.mkdir()
    (out / "other").touch()
    fails("is not empty", run)
    (run / "summary.json").write_text("{")
    fails("is not a run's summary.json", run)
    (run / "summary.json").unlink()
    (run / "encoder.safetensors").write_bytes(b"no encoder")
    fails("cannot read encoder file", run)
