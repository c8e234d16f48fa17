"""Weights of other trainers: found under any prefix, loaded without running anything, and refused in one line."""

from __future__ import annotations

import argparse
import os
import pickle
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.data.pixels import IMAGENET
from trainer.export.__main__ import main
from trainer.export.weights_file import read_weights
from trainer.model import EncoderConfig, build_model, load_encoder, save_encoder
from trainer.torchvision_schemas import import_module

Tensors = dict[str, Tensor]
NAME = "torchvision:shufflenet_v2_x0_5"
"""A small model, of NUM_TENSORS without its classifier."""
NUM_TENSORS = 336
VIT = "timm:vit_tiny_patch16_224"
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def _models(name: str, seed: int, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        family, _, short = name.partition(":")
        if family == "timm":
            model: nn.Module = import_module("timm").create_model(short, **options)
        else:
            model = import_module("torchvision.models").get_model(short, weights=None, **options)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
                nn.init.normal_(module.running_mean, std=0.1)
    return model.eval()


def weights(seed: int = 1, name: str = NAME) -> Tensors:
    """The weights of a model with its classifier."""
    return dict(_models(name, seed).state_dict())


def under(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + key: tensor for key, tensor in tensors.items()}


def without(tensors: Tensors, *starts: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith(starts)}


def run_import(path: Path, *arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(path), *map(str, arguments)])
    return stopped.value.code


def imported(path: Path, *arguments: object) -> nn.Module:
    output = path.parent / "imported.safetensors"
    output.unlink(missing_ok=True)
    assert run_import(path, "--output", output, *arguments) == 0
    return load_encoder(output)[0]


def assert_is(encoder: nn.Module, tensors: Tensors) -> None:
    """The encoder has these weights, bit for bit."""
    for key, tensor in encoder.state_dict().items():
        torch.testing.assert_close(tensor, tensors[key.removeprefix("classifier.")], rtol=0, atol=0)


def moco_2() -> dict[str, Any]:
    keys = under("module.encoder_q.", without(weights(1), "fc")) | under("module.encoder_k.", without(weights(2), "fc"))
    heads = {f"module.encoder_{which}.fc.{layer}.weight": torch.zeros(2, 2) for which in "qk" for layer in (0, 2)}
    queue = {"module.queue": torch.zeros(128, 8), "module.queue_ptr": torch.zeros(1, dtype=torch.int64)}
    state: dict[str, Any] = {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.03}]}
    return {"epoch": 200, "arch": "resnet18", "state_dict": keys | heads | queue, "optimizer": state}


def moco_3() -> dict[str, Any]:
    keys = under("module.base_encoder.", weights(1)) | under("module.momentum_encoder.", weights(2))
    return {
        "epoch": 100,
        "state_dict": keys | {"module.predictor.0.weight": torch.zeros(2, 2)},
        "scaler": {"scale": 1.0},
    }


def dino() -> dict[str, Any]:
    head = {"head.mlp.0.weight": torch.zeros(2, 2)}
    return {
        "teacher": under("backbone.", without(weights(1), "fc")) | head,
        "student": under("module.", under("backbone.", without(weights(2), "fc")) | head),
        "args": argparse.Namespace(arch="resnet18", lr=np.float64(0.1)),
        "dino_loss": {"center": torch.zeros(1, 4)},
    }


def byol() -> Tensors:
    keys = under("online_encoder.net.", weights(1)) | under("target_encoder.net.", weights(2))
    return keys | {"online_predictor.net.0.weight": torch.zeros(2, 2)}


def timm_training() -> dict[str, Any]:
    return {"state_dict": weights(2), "state_dict_ema": weights(1), "metric": np.float64(71.5), "arch": "resnet18"}


def lightly() -> dict[str, Any]:
    """A backbone nn.Sequential(*model.children()) without the classifier, whose keys begin with numbers."""
    parts = nn.Sequential(*list(_models(NAME, 1).children())[:-1])
    return {"state_dict": under("backbone.", dict(parts.state_dict()))}


SEVERAL = (moco_2, moco_3, dino, byol, timm_training)
"""Files with several encoders, one of which is to be chosen."""


@pytest.mark.parametrize(
    ("make", "prefix", "left_out"),
    [
        (moco_2, "state_dict.module.encoder_q.", "state_dict.module.encoder_q.fc (2)"),
        (moco_3, "state_dict.module.base_encoder.", "state_dict.module.momentum_encoder (338)"),
        (dino, "teacher.backbone.", "teacher.head (1)"),
        (lambda: without(weights(), "fc"), "no prefix", "nothing"),
        (weights, "no prefix", "fc (2)"),
        (byol, "online_encoder.net.", "target_encoder (338)"),
        (timm_training, "state_dict_ema.", "state_dict (338)"),
        (lambda: {"state_dict": under("module.", weights())}, "state_dict.module.", "state_dict.module.fc (2)"),
        (lambda: {"state_dict": under("encoder.", weights())}, "state_dict.encoder.", "state_dict.encoder.fc (2)"),
        (lambda: {"model": under("module.backbone.", weights())}, "model.module.backbone.", "fc (2)"),
        (lambda: {"model_state": weights(), "epoch": 1}, "model_state.", "model_state.fc (2)"),
        (lightly, "state_dict.backbone.", "left out nothing"),
        (lambda: without(weights(), "fc") | {"num_batches": torch.ones(1)}, "no prefix", "num_batches (1)"),
    ],
)
def test_finds_the_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[], Any], prefix: str, left_out: str
) -> None:
    path = tmp_path / "other.pth.tar"
    torch.save(make(), path, _use_new_zipfile_serialization=make in (dino, moco_3, weights))  # or as torch before 1.6
    options = ["--model", NAME]
    if make in SEVERAL:
        assert run_import(path, "--output", tmp_path / "none", *options) == 1
        assert re.search(rf"holds {NAME} under .*{re.escape(prefix)}.*: choose by --prefix\n$", capsys.readouterr().err)
        options += ["--prefix", prefix]
    assert_is(imported(path, *options), weights(1))
    printed = capsys.readouterr()
    took, left, *_ = printed.out.splitlines()
    assert took == f"took {NUM_TENSORS} tensors of {NAME} under {prefix}"
    assert left.startswith("left out ")
    assert left_out in left
    assert not printed.err


def test_each_prefix_that_the_refusal_names_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_moco = "state_dict.module.encoder_q., state_dict.module.encoder_k."
    twice = {"model": weights(1), "ema": {"model": weights(2)}}
    for content, line, chosen in (
        (twice, "model., ema.model.", {"model": 1, "model.": 1, "ema.model": 2, "ema": 2}),
        (weights(1) | {"ema": weights(2)}, "no prefix (--prefix=), ema.", {"": 1, "ema": 2}),
        (moco_2(), of_moco, {"encoder_k": 2, "module.encoder_k": 2}),
    ):
        path = written(tmp_path / "ema.pt", content)
        assert run_import(path, "--model", NAME, "--output", tmp_path / "none") == 1
        assert capsys.readouterr().err.endswith(f"holds {NAME} under {line}: choose by --prefix\n")
        for prefix, seed in chosen.items():
            assert_is(imported(path, "--model", NAME, f"--prefix={prefix}"), weights(seed))


def test_old_files_do_not_count_batches(tmp_path: Path) -> None:
    path, tensors = tmp_path / "old.pth", weights()
    torch.save({key: tensor for key, tensor in tensors.items() if "num_batches" not in key}, path)
    encoder = imported(path, "--model", NAME)
    assert_is(encoder, tensors | {key: torch.tensor(0) for key in tensors if "num_batches" in key})


def test_a_vision_transformer_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own positions at the size that it was trained at; at another one, those that timm interpolates."""
    path, trained = tmp_path / "vit.pth", _models(VIT, 1, img_size=96)
    torch.save({"teacher": under("backbone.", dict(trained.state_dict())), "student": weights(1, VIT)}, path)
    options = ["--model", VIT, "--prefix", "teacher", "--image-size"]
    assert_is(imported(path, *options, "96"), dict(trained.state_dict()))
    printed = capsys.readouterr().out
    assert "interpolated" not in printed
    assert "teacher.backbone.head (2)" in printed
    assert "timm's own weights of this name expect --pixel-mean 0.5 0.5 0.5 --pixel-std 0.5 0.5 0.5" in printed
    encoder = imported(path, *options, "160")
    printed = capsys.readouterr().out
    assert "interpolated teacher.backbone.pos_embed from 6×6 to 10×10 patches\n" in printed
    assert "interpolated student" not in printed
    theirs = _models(VIT, 2, img_size=160)
    theirs.load_state_dict(
        import_module("timm.models.vision_transformer").checkpoint_filter_fn(dict(trained.state_dict()), theirs)
    )
    assert_is(encoder, dict(theirs.state_dict()))


def test_refuses_positions_that_cannot_be_interpolated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No square, no patch, sparse and complex ones."""
    ones, path = torch.ones(1, 37, 192), tmp_path / "vit.pth"
    for positions in (ones[:, 1:], ones[:, :1], ones.to_sparse(), ones.to(torch.complex64)):
        torch.save(weights(1, VIT) | {"pos_embed": positions.clone()}, path)
        assert run_import(path, "--model", VIT, "--output", tmp_path / "none") == 1
        said = f"(pos_embed is {list(positions.shape)}, not [1, 197, 192]): give its --model and --image-size\n"
        assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_converts_to_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype) -> None:
    tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in without(weights(), "fc").items()}
    save_file(tensors, tmp_path / "half.safetensors")
    encoder = imported(tmp_path / "half.safetensors", "--model", NAME)
    assert_is(encoder, {k: t.float() if t.is_floating_point() else t for k, t in tensors.items()})
    assert f"converted 280 tensors from {dtype} to float32\n" in capsys.readouterr().out


def test_the_config_is_as_given(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "a.pth")
    imported(tmp_path / "a.pth", "--model", NAME)
    config = load_encoder(tmp_path / "imported.safetensors")[1]
    assert (config.name, config.image_size, config.in_channels, config.pixels) == (NAME, 224, 3, IMAGENET)
    options = "--in-channels 1 --image-size 96 --pixel-mean 0.25 --pixel-std 0.5"
    imported(tmp_path / "a.pth", "--model", NAME, *options.split())
    config = load_encoder(tmp_path / "imported.safetensors")[1]
    assert (config.image_size, config.in_channels, config.pixels) == (96, 1, ((0.25,), (0.5,)))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, traces: Path) -> None:
        self.traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.traces}",)


@pytest.mark.parametrize("is_new", [True, False])
def test_runs_nothing_that_a_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_new: bool) -> None:
    traces, path, output = tmp_path / "traces", tmp_path / "evil.pth", tmp_path / "out.safetensors"
    torch.save({"state_dict": weights(), "more": Evil(traces)}, path, _use_new_zipfile_serialization=is_new)
    assert run_import(path, "--model", NAME, "--output", output) == 1
    error = capsys.readouterr().err
    assert "evil.pth contains posix.system, but only weights are loaded" in error
    assert error.count("\n") == 1
    assert "weights_only" not in error  # torch's advice
    path.write_bytes(pickle.dumps({"more": Evil(traces)}, protocol=2))
    assert run_import(path, "--model", NAME, "--output", output) == 1
    assert not output.exists()
    assert not traces.exists()
    pickle.loads(path.read_bytes())  # noqa: S301 - the file would have done it
    assert traces.exists()


def test_placeholders_run_nothing_and_hold_nothing(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(x=torch.ones(3)), "w": torch.ones(2), "best": np.float64(1)}, tmp_path / "a")
    assert list(read_weights(tmp_path / "a").tensors) == ["w"]


def test_nested_containers_end(tmp_path: Path) -> None:
    """A container within itself, and one that is reached in exponentially many ways."""
    loop: dict[str, Any] = {"w": torch.ones(1)}
    loop["loop"] = loop
    many: dict[str, Any] = {"v": torch.ones(1)}
    for _ in range(100):
        many = {str(number): many for number in range(10)}
    torch.save({"loop": loop, "many": many, "list": [{"u": torch.ones(1)}], 7: {"w": torch.ones(1)}}, tmp_path / "a")
    assert sorted(read_weights(tmp_path / "a").tensors) == ["7.w", "loop.w"]


def written(path: Path, content: object) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


def changed(key: str, tensor: Tensor) -> Tensors:
    return weights() | {key: tensor}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: b"", "is empty"),
        (lambda: b"<!DOCTYPE html><html>Not found</html>", "begins with b'<!DOCTYPE html><html>"),
        (lambda: b"\x1f\x8b\x08" + bytes(50), "give a file of torch.save or safetensors, downloaded or copied again"),
        (lambda: b"PK\x03\x04" + bytes(100), "is damaged, incomplete or no checkpoint"),
        (lambda: b"\x80\x02" + bytes(100), "is damaged, incomplete or no checkpoint"),
        (lambda: bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b"{not json", "is damaged or incomplete"),
        (lambda: [torch.ones(3)], "holds no tensors with names"),
        (lambda: {"epoch": 3}, "holds no tensors with names"),
        (lambda: {"a\x1b[2J\nb": torch.ones(3)}, r"names a tensor 'a\x1b[2J\nb'"),
        (lambda: {"encoder.vit.weight": torch.ones(3)}, f"has no keys of {NAME}: its keys are encoder.vit.weight"),
        (
            lambda: under("module.", without(weights(), "conv5")),
            "under module. 5 of 336 keys are missing (conv5.0.weight, conv5.1.weight, conv5.1.bias, …)",
        ),
        (
            lambda: changed("conv1.0.weight", torch.ones(24, 3, 7, 7)),
            "1 tensors have another shape (conv1.0.weight is [24, 3, 7, 7], not [24, 3, 3, 3])",
        ),
        (
            lambda: changed("stage4.4.branch2.0.weight", torch.ones(3)),
            f"holds another model than {NAME}: it has 1 tensors more in the same parts (stage4.4.branch2.0.weight)",
        ),
        (lambda: _models("torchvision:shufflenet_v2_x1_0", 1).state_dict(), "tensors have another shape (stage2.0."),
        (
            lambda: changed("conv1.1.bias", torch.full((24,), torch.nan)),
            "NaN or infinite numbers in 1 tensors (conv1.1.bias)",
        ),
        (
            lambda: changed("conv1.1.bias", torch.full((24,), 1e300, dtype=torch.float64)),
            "NaN or infinite numbers in 1",
        ),
        (lambda: changed("conv1.1.bias", torch.ones(24, dtype=torch.int8)), "conv1.1.bias holds torch.int8 numbers"),
        (lambda: changed("conv1.1.bias", torch.ones(24).to_sparse()), "conv1.1.bias is sparse, quantised or complex"),
        (lambda: {"a": weights(1), "b": weights(2)}, f"holds {NAME} under a., b.: choose by --prefix"),
    ],
)
def test_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Callable[[], object], message: str
) -> None:
    path, output = written(tmp_path / "other.pth", content()), tmp_path / "out.safetensors"
    assert run_import(path, "--model", NAME, "--output", output) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_refuses_a_truncated_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_new: bool, share: float
) -> None:
    path = tmp_path / "other.pth"
    torch.save(weights(), path, _use_new_zipfile_serialization=is_new)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert run_import(path, "--model", NAME, "--output", tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "other.pth is damaged, incomplete or no checkpoint" in error
    assert error.count("\n") == 1


def test_refuses_arguments_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = written(tmp_path / "other.pth", weights()), tmp_path / "out.safetensors"

    def fails(message: str, *arguments: object, file: Path = path) -> None:
        assert run_import(file, "--output", output, *arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    assert run_import(path, "--output", output) == 2
    assert "arguments are required: --model" in capsys.readouterr().err
    fails("unknown encoder 'torchvision:resnet19'", "--model", "resnet19")
    fails("timm has no model 'resnet19'", "--model", "timm:resnet19")
    fails("--model 'small' is no library's", "--model", "small")
    fails("--pixel-mean and --pixel-std belong together", "--model", NAME, "--pixel-mean", 0.5)
    fails("do not match 1 channels", "--model", NAME, "--in-channels", 1)
    fails(f"has no keys of {NAME} under --prefix 'teacher'", "--model", NAME, "--prefix", "teacher")
    fails("cannot read", "--model", NAME, file=tmp_path / "none")
    fails("Is a directory", "--model", NAME, file=tmp_path)
    vit = written(tmp_path / "vit.pth", weights(1, VIT))
    fails("cannot take 8 px images", "--model", VIT, "--image-size", 8, file=vit)
    config = EncoderConfig(width=4, blocks=(1,))
    save_encoder(build_model(config, seed=0).encoder, config, tmp_path / "ours.safetensors")
    fails("was written by this trainer", "--model", NAME, file=tmp_path / "ours.safetensors")
    output.touch()
    fails("exists: give another --output", "--model", NAME)
