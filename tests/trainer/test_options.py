"""Options that save time or memory, or compare with the paper, against runs without them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.helpers.small_run import EVERY, NUM_IMAGES, losses, small_run
from trainer.arguments import parse, parse_config
from trainer.build import model_of
from trainer.classes import RunClasses
from trainer.config import TrainConfig
from trainer.data.augment import AugmentationConfig
from trainer.loop import train
from trainer.model import EncoderConfig, PICModel, build_model
from trainer.presets import PRESETS
from trainer.run.checkpoint_file import saved_steps
from trainer.run.opening import head_of
from trainer.settings import SettingError
from trainer.torchvision_schemas import import_module
from weightserver.torch import RangesOrder, Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
GROUP_NORM = EncoderConfig(in_channels=3, image_size=16, width=8, stem_stride=2, blocks=(1, 1), norm="group")
NO_AUGMENTATION = AugmentationConfig(strong=False, min_scale=1.0, max_aspect_ratio=1.0, flip_probability=0)


def run(output: Path, **changes: Any) -> npt.NDArray[np.float64]:
    """The losses of a run with dense rows, in which an image's features depend on no other image."""
    settings: dict[str, Any] = {"rows": "dense", "encoder": GROUP_NORM, "learning_rate": 0.05}
    train(small_run(output, **settings | changes))
    return np.array(losses(output))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> npt.NDArray[np.float64]:
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        pytest.param({"accumulate": 4}, 1e-5, id="a batch in four parts"),
        pytest.param({"deterministic": True}, 0, id="deterministic"),
        pytest.param({"precision": "bfloat16"}, 0.02, id="bfloat16"),
        pytest.param(
            {"compile": True},
            1e-4,
            id="compiled",
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")],  # torch's
        ),
    ],
)
def test_the_losses_stay_what_they_were(
    changes: dict[str, Any], tolerance: float, plain: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    assert len(set(plain)) == len(plain), "something moves"
    assert run(tmp_path / "run", **changes) == pytest.approx(plain, rel=tolerance, abs=0)


def test_compiling_without_a_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would end in pages of a traceback, after the run has begun."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = parse_config(["synthetic", "--compile"]).problems()
    assert str(problem) == "--compile finds no C compiler: install gcc and g++, or give --no-compile"
    assert not list(parse_config(["synthetic"]).problems())


@pytest.mark.parametrize(
    ("changes", "device", "mode"),
    [
        ({}, "cuda:0", "reduce-overhead"),
        ({"accumulate": 2}, "cuda:0", None),
        ({"views": 2}, "cuda:0", None),
        ({}, "cpu", None),
    ],
)
def test_a_gpu_launches_a_compiled_encoder_as_a_graph_unless_gradients_are_accumulated(
    changes: dict[str, Any], device: str, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launch of a graph overwrites the gradients of the last."""
    modes: list[str | None] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, *, mode, **_: modes.append(mode))
    monkeypatch.setattr(PICModel, "to", lambda model, *_, **__: model)  # without a GPU
    model_of(small_run(tmp_path, compile=True, **changes), Ranks(device=torch.device(device)))
    assert modes == [mode]


def test_an_encoder_with_further_classifiers_is_refused(tmp_path: Path) -> None:
    """While they are trained, torchvision's GoogLeNet and Inception return what these say, too."""
    encoder = EncoderConfig(name="googlenet", in_channels=3, image_size=64, options=("init_weights=False",))
    with pytest.raises(ValueError, match=r"'googlenet' .*: give --encoder\.options aux_logits=False"):
        model_of(small_run(tmp_path, encoder=encoder), Ranks())
    encoder = dataclasses.replace(encoder, options=(*encoder.options, "aux_logits=False"))
    model = model_of(small_run(tmp_path, encoder=encoder), Ranks()).train()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 16)


@pytest.mark.parametrize(("changes", "momentum"), [({"optimizer": "adamw"}, 0.8), ({"row_momentum": 0.4}, 0.4)])
def test_rows_have_sgd_of_their_own(changes: dict[str, Any], momentum: float, tmp_path: Path) -> None:
    """That of a head, which the programs in tests/head compare with torch.optim.SGD."""
    settings = {"row_learning_rate": 3.0, "momentum": 0.8, "weight_decay": 1e-2}
    config, order = small_run(tmp_path, rows="dense", **settings | changes), RangesOrder([NUM_IMAGES], 0)
    with head_of(config, RunClasses(order, order), Ranks()) as head:
        assert (head.spec.momentum, head.spec.weight_decay) == (momentum, 1e-2)
        assert head._table._rows.learning_rates([0.05]) == pytest.approx([0.15])


OF_LIBRARIES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.8, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.01),
    "lars": lambda p: import_module("timm.optim").Lars(p, lr=0.03, momentum=0.8, weight_decay=0.01),
    "lamb": lambda p: import_module("timm.optim").Lamb(p, lr=0.03, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_the_encoder_has_the_optimizer_of_its_library(name: Any, tmp_path: Path) -> None:
    config = small_run(tmp_path, optimizer=name, momentum=0.8, weight_decay=0.01)
    config.check()
    ours, theirs = (torch.nn.Linear(3, 2) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizers = [config.optimization.optimizer_of(ours, torch.device("cpu")), OF_LIBRARIES[name](theirs.parameters())]
    for group in optimizers[0].param_groups:
        group["lr"] = 0.03
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            model.weight.grad, model.bias.grad = model.weight.detach() - step, model.bias.detach() + step
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)


@pytest.mark.parametrize(("name", "share"), [("lars", 0.001), ("lamb", 1.0)])
def test_layers_adapt_their_steps_without_weight_decay(name: Any, share: float, tmp_path: Path) -> None:
    """A step moves a layer by the learning rate times a share of its own norm, whatever the gradient."""
    model = torch.nn.Linear(3, 2, bias=False)
    before = model.weight.detach().clone()
    config = small_run(tmp_path, optimizer=name, weight_decay=0.0)
    optimizer = config.optimization.optimizer_of(model, torch.device("cpu"))
    optimizer.param_groups[0]["lr"] = 0.03
    model.weight.grad = torch.full_like(model.weight, 1_000.0)
    optimizer.step()
    moved = ((model.weight - before).norm() / before.norm()).item()
    assert moved == pytest.approx(0.03 * share, rel=1e-3)


def test_an_optimizer_has_the_learning_rates_of_the_run(tmp_path: Path) -> None:
    """The first update of AdamW moves each weight by the learning rate, wherever its gradient is not nearly 0."""
    settings = {"optimizer": "adamw", "learning_rate": 0.004, "weight_decay": 0.0, "steps": 1, "warmup_fraction": 0.0}
    config = small_run(tmp_path / "run", rows="dense", **settings)
    before = model_of(config, Ranks()).head.state_dict()
    after = train(config).model.head.state_dict()
    moved = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert moved.max().item() == pytest.approx(0.004, rel=1e-4)


@pytest.mark.guard
def test_two_equal_views_are_as_good_as_one(tmp_path: Path) -> None:
    one = run(tmp_path / "one", augmentation=NO_AUGMENTATION)
    assert run(tmp_path / "two", augmentation=NO_AUGMENTATION, views=2) == pytest.approx(one, rel=1e-5)
    assert run(tmp_path / "parts", augmentation=NO_AUGMENTATION, views=2, accumulate=2) == pytest.approx(one, rel=1e-5)


def test_two_views_are_two(plain: npt.NDArray[np.float64], tmp_path: Path) -> None:
    two = run(tmp_path / "two", views=2)
    assert two[0] != plain[0]
    assert abs(two - plain).max() < 1, "the same images"


@pytest.mark.guard
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"softmax": "plain", "learning_rate": 0.5}, id="plain softmax"),
        pytest.param({"head_layers": 1}, id="one layer in the head"),
        pytest.param({"augmentation": AugmentationConfig(strong=False)}, id="weak augmentation"),
        pytest.param({"view_size": 12}, id="smaller views"),
    ],
)
def test_components_to_compare_with_learn_too(
    changes: dict[str, Any], plain: npt.NDArray[np.float64], tmp_path: Path
) -> None:
    """Table 1 of the paper, and views that are smaller than images."""
    found = run(tmp_path / "run", **changes)
    assert found[0] != plain[0]
    assert found[-10:].mean() < found[:10].mean()


def test_the_encoder_alone_computes_in_bfloat16() -> None:
    model = build_model(GROUP_NORM, 8, seed=0).eval()
    images = torch.rand(4, 3, 16, 16)
    exact = model(images)
    model.encoder_in_bfloat16 = True
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda _, inputs, output: seen.extend([*inputs, output]))
    rounded = model(images)
    assert {tensor.dtype for tensor in seen} == {torch.float32}
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.01)


@pytest.mark.guard  # seconds
def test_overflowed_weights_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two logged steps, where the loss is not read."""
    step, count = torch.optim.SGD.step, iter(range(1, 1000))

    def overflow(self: torch.optim.SGD) -> None:
        step(self)
        if next(count) == 2 * EVERY:
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(torch.inf)

    monkeypatch.setattr(torch.optim.SGD, "step", overflow)
    with pytest.raises(ValueError, match=rf"weights overflowed before step {2 * EVERY}, which is not saved"):
        train(small_run(tmp_path / "run", log_every=1000, steps=100, num_shards=1))
    assert saved_steps(tmp_path / "run" / "checkpoints") == [0, EVERY]


def test_resume_is_a_flag_that_a_word_may_follow(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"": False, "--resume": True, "--resume auto": "auto", "--resume=auto": "auto", "--resume --seed 3": True}
    for words, expected in cases.items():
        assert parse_config(["synthetic", *words.split()]).run.resume == expected, words
    with pytest.raises(SystemExit):
        parse_config(["synthetic", "--resume", "never"])
    assert "--resume stands alone or with 'auto', not with 'never'" in capsys.readouterr().err


def test_a_preset_fits_fewer_images_and_messages_name_options(tmp_path: Path) -> None:
    config = parse_config(["synthetic", "--num-images", "5000"])
    assert (config.sampling.window_size, config.rows.num_negatives) == (5_000, 5_000)
    config.check_classes(5_000)
    config.sampling.visit_schedule(5_000)
    given = parse_config(["synthetic", "--num-images", "5000", "--num-negatives", "6000", "--window-size", "5001"])
    with pytest.raises(SettingError, match=r"^--num-negatives is 6000, ") as raised:
        given.check_classes(5_000)
    assert raised.value.settings == ("num_negatives",)
    with pytest.raises(SettingError, match=r"^--window-size must lie in 1\.\.5000, "):
        given.sampling.visit_schedule(5_000)


def test_what_is_given_is_known_however_it_is_spelled() -> None:
    words = "--batch_size=8 --no_evaluate --encoder.stem-stride 1 --augmentation.no-strong --no-correction --steps None"
    given = {"batch_size": 8, "evaluate": False, "encoder.stem_stride": 1, "augmentation.strong": False}
    assert parse(["demo", *words.split()]).given == given | {"correction": "none", "steps": None}


def test_settings_change_by_name() -> None:
    scale = {"encoder.pixel_mean": (0.1,), "encoder.pixel_std": (0.2,)}
    config = TrainConfig().with_settings(rows="dense", window_size=9, **scale)
    assert (config.rows.rows, config.sampling.window_size, config.model.encoder.pixel_std) == ("dense", 9, (0.2,))
    stored = config.with_settings(warmup_fraction=0.1, output=config.run.output.absolute())
    assert TrainConfig.of_run(json.loads(config.to_json())) == stored
    for name in ("stride", "data", "encoder.sides"):
        with pytest.raises(TypeError, match=name.rpartition(".")[2]):
            config.with_settings(**{name: 3})


def test_all_problems_are_found_and_name_their_settings() -> None:
    config = TrainConfig().with_settings(num_shards=0, rows="dense", capacity=4, row_momentum=1.0, momentum=-1.0)
    wrong = ["row_momentum", "capacity", "num_shards", "momentum"]
    assert [problem.settings for problem in config.problems()] == [(name,) for name in wrong]
    config = TrainConfig().with_settings(rows="dense", resume=True, labels="classes", extend=True)
    assert [problem.settings for problem in config.problems()] == [("rows", "resume"), ("labels", "extend")]
    of_two = parse_config(["synthetic", "--encoder.pixel-mean", "0.5", "--encoder.pixel-std", "nan"])
    assert [problem.settings for problem in of_two.problems()] == [("encoder.pixel_mean",)], "it is said once"


def test_options_of_an_encoder_are_literals_or_texts() -> None:
    words = "--encoder.name timm:resnet18 --encoder.options a=False b=0.1 c=(1,2) d=silu e= f='3' g=h=i j=b'k'"
    encoder = parse_config(["synthetic", *words.split()]).model.encoder
    expected = {"a": False, "b": 0.1, "c": (1, 2), "d": "silu", "e": "", "f": "3", "g": "h=i", "j": "b'k'"}
    assert encoder.keywords() == expected


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("small", "a=1", "a=1 is for models of timm and torchvision, not for small"),
        ("none", "a=1", "a=1 is for models of timm and torchvision, not for none"),
        ("timm:resnet18", "a", "a is not NAME=VALUE: give zero_init_last=False, for example"),
        ("timm:resnet18", "=1", "=1 is not NAME=VALUE"),
        ("timm:resnet18", "img_size=8", "img_size=8 sets what the trainer sets: give --encoder.image-size"),
        ("timm:resnet18", "in_chans=1", "in_chans=1 sets what the trainer sets: give --encoder.in-channels"),
        ("timm:resnet18", "pretrained=True", "pretrained=True sets what the trainer sets: omit it"),
        ("resnet18", "num_classes=3", "num_classes=3 sets what the trainer sets: omit it"),
        ("timm:resnet18", "a=1 a=2", "a=2 sets a again: give it once"),
        ("timm:resnet18", "a=true", "a=true would be a text: give a=True"),
    ],
)
def test_options_that_no_encoder_has_are_refused_in_one_line(name: str, option: str, message: str) -> None:
    config = parse_config(["synthetic", "--encoder.name", name, "--encoder.options", *option.split()])
    (problem,) = config.problems()
    assert str(problem).startswith(f"--encoder.options {message}")


def test_correction_takes_a_name_and_has_a_flag_for_none() -> None:
    cases = {"": "exact", "--correction paper": "paper", "--correction=none": "none", "--no-correction": "none"}
    for words, expected in cases.items():
        assert parse_config(["synthetic", *words.split()]).rows.correction == expected, words


def test_without_arguments_the_presets_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config([])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"begin with a folder of images, or one of {', '.join(PRESETS)}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"servers": "10.0.0.1:1"}, r"--servers 10\.0\.0\.1:1 is on another machine .* --insecure"),
        ({"rows": "dense", "servers": "127.0.0.1:1"}, "--rows dense keeps the rows in the trainer: omit --servers"),
        ({"rows": "dense", "correction": "paper"}, "--correction paper corrects rows after a gap, .*: use --rows resi"),
        ({"correction": "later"}, "--correction must be exact, paper or none, got later"),
        ({"keep_checkpoints": 1_000}, r"--keep-checkpoints must lie in 1\.\.900, got 1000: the weight "),
        ({"accumulate": 3}, "--batch-size 16 is not a multiple of --accumulate 3"),
        ({"accumulate": 0}, "--accumulate must be at least 1, got 0"),
        ({"views": 0}, "--views must be at least 1, got 0"),
        ({"window_size": 0}, "--window-size must be at least 1, got 0"),
        ({"view_size": 0}, "--view-size must be at least 1, got 0"),
        ({"optimizer": "adam"}, "--optimizer must be sgd, adamw, lars or lamb, got adam"),
        ({"head_layers": 3}, "--head-layers must be 1 or 2, got 3"),
        ({"row_momentum": 1.0}, "--row-momentum must be at least 0 and below 1, got 1"),
        ({"row_learning_rate": 0.0}, "--row-learning-rate must be positive and finite, got 0"),
        ({"softmax": "linear"}, "--softmax must be cosine or plain, got linear"),
        ({"softmax": "plain", "temperature": 0.5}, "--temperature 0.5 is for --softmax cosine: omit it, or give"),
        ({"decode_threads": 0}, "--decode-threads must be at least 1, got 0"),
        ({"decode_threads": 2}, "--decode-threads 2 is for --dataset packed or folder: omit it, or give"),
        ({"stray": "use"}, "--stray use is for --dataset packed or folder: omit it, or give"),
        ({"token_file": Path("token")}, "--token-file token is for --servers: omit it, or give --servers too"),
    ],
)
def test_check_rejects_impossible_options(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, **changes).check()


@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 1), (8, 8), (6, 6)])
def test_every_rank_has_images_in_every_part(
    batch_size: int, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    small_run(tmp_path, batch_size=2 * accumulate, accumulate=accumulate).check()
    message = rf"--batch-size {batch_size} in {accumulate} parts \(--accumulate\) leaves some of 2 ranks without images"
    with pytest.raises(ValueError, match=message):
        small_run(tmp_path, batch_size=batch_size, accumulate=accumulate).check()


def test_a_resumed_run_may_have_unused_options(tmp_path: Path) -> None:
    """Older versions accepted them, and a run keeps its settings."""
    small_run(tmp_path, softmax="plain", temperature=0.5, resume=True).check()
