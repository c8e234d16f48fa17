"""Settings that --print-config writes and --config reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.helpers.image_tree import plain_tree
from trainer.__main__ import main
from trainer.arguments import parse, parse_config
from trainer.config_file import parse_with_file, to_toml
from trainer.own_images import images_config
from trainer.presets import PRESETS

_OF_EVERY_KIND = [
    *("--epochs", "0.1", "--no-evaluate", "--num-negatives", "64", "--wandb-project", "None", "--correction", "paper"),
    *("--warmup-fraction", "0.25", "--encoder.blocks", "2", "1", "--augmentation.no-strong", "--rows", "remote"),
    *("--view-size", "None", "--augmentation.blur-sigma", "0.01", "1e-1", "--seed", str(2**64 - 1)),
    *("--encoder.name", "timm:resnet18", "--encoder.options", "zero_init_last=False", "act_layer='a \"b\"'"),
    *("--output", 'a "b" \\ = #\x7f\nü', "--labels=-C"),
]


@pytest.mark.parametrize(
    ("preset", "options"),
    [*((preset, _OF_EVERY_KIND) for preset in PRESETS), ("demo", []), ("cifar-10", ["--views", "2"])],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:1]) or "nothing",
)
def test_what_is_written_is_read_back(preset: str, options: list[str], tmp_path: Path) -> None:
    config = parse_config([preset, *options])
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config, preset), encoding="utf-8")
    assert parse_with_file(["--config", str(file)]).config() == config
    other = parse_with_file([preset, f"--config={file}", "--seed", "7"]).config()
    assert other == config.with_settings(seed=7)
    assert (tomllib.loads(file.read_text()) == {"preset": preset}) == (not options), "differences alone"


def test_steps_of_a_preset_or_a_file_do_not_override_epochs_of_the_command_line(tmp_path: Path) -> None:
    assert parse_config(["synthetic", "--epochs", "3"]).optimization.num_steps(512_000) == 3_000
    assert parse_config(["synthetic", "--epochs", "3", "--steps", "7"]).optimization.num_steps(512_000) == 7
    file = tmp_path / "run.toml"
    file.write_text('preset = "demo"\nsteps = 7\n')
    options = ["--config", str(file)]
    assert parse_with_file(options).config().optimization.num_steps(128) == 7
    assert parse_with_file([*options, "--epochs", "3"]).config().optimization.num_steps(128) == 3


def test_settings_are_printed_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fashion-mnist", "--encoder.width", "8", "--print-config", "--epochs", "2"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    settings, proportions = printed.split("# ", maxsplit=1)
    assert settings == 'preset = "fashion-mnist"\nepochs = 2.0\n\n[encoder]\nwidth = 8\n'
    assert "# visits to each row: 2\n" in proportions
    with pytest.raises(SystemExit):
        main(["fashion-mnist", "--labels", "classes", "--print-config"])
    assert "#" not in capsys.readouterr().out, "rows are fewer than images, by a number that is not known yet"
    assert not list(tmp_path.iterdir())


def test_the_number_of_packed_images_is_for_the_comments_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A run takes all images of a folder or pack, and refuses a number of them."""
    with pytest.raises(SystemExit):
        main(["imagenet-1k", "--data-dir", "packed", "--num-images", "1281167", "--print-config"])
    settings, proportions = capsys.readouterr().out.split("# ", maxsplit=1)
    assert settings == 'preset = "imagenet-1k"\ndata_dir = "packed"\n'
    assert "# visits to each row: 200\n" in proportions


def test_what_is_chosen_for_ones_own_images_is_written_and_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--data-dir", str(plain_tree(tmp_path / "pictures", 20)), "--device", "cpu", "--num-negatives", "16"]
    with pytest.raises(SystemExit) as ended:
        main(["images", *arguments, "--print-config"])
    assert not ended.value.code
    Path("run.toml").write_text(capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures", "run.toml"]
    assert images_config(parse_with_file(["--config", "run.toml"])) == images_config(parse(["images", *arguments]))


def test_a_folder_is_trained_on_with_the_preset_of_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('preset = "imagenet-1k"\n')
    Path("packed").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["packed", "--config=run.toml", "--print-config"])
    assert not ended.value.code
    assert capsys.readouterr().out == 'preset = "imagenet-1k"\ndata_dir = "packed"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs = 2", "preset is None: give one of fashion-mnist, demo,"),
        ('preset = "demo"\nepocs = 2', "epocs is no setting of a run: did you mean epochs?"),
        ('preset = "demo"\n[encoder]\nwith = 2', "encoder.with is no setting of a run: did you mean encoder.width?"),
        ('preset = "demo"\nresume = true', "resume is no setting of a run"),
        ('preset = "demo"\nepochs = = 2', "(at line 2, column 10)"),
        (
            'preset = "demo"\n[rows]\nnum_negatives = 10\nrows = "dense"',
            "[rows] is no table of settings: write num_negatives, rows above all tables, named as the options",
        ),
        ('preset = "demo"\n[sampling]', "[sampling] is no table of settings: write settings above all tables"),
        ('preset = "demo"\nencoder.blocks = [1, "--output=a"]', "encoder.blocks has '--output=a', which would be"),
        ('preset = "imagenet-1k"', "its preset is imagenet-1k: omit demo, or give another file"),
        (None, "No such file or directory"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        parse_with_file(["demo", "--config", str(file)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainer: --config {file}: ")
    assert said in line


def test_a_value_that_the_parser_refuses_is_said_to_be_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('preset = "demo"\nrows = "sparse"')
    with pytest.raises(SystemExit) as ended:
        parse_with_file(["demo", "--config", str(file)])
    assert ended.value.code == 2
    *box, last = capsys.readouterr().err.splitlines()
    assert "invalid choice 'sparse' for argument '--rows'" in "\n".join(box)
    assert last == f"trainer: --config {file}: the reason is above"
