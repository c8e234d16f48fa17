"""Evaluates an encoder, or raw pixels for comparison, on a labelled data set.

    python -m trainer.evaluate knn --run runs/a
    python -m trainer.evaluate linear --encoder runs/a/encoder.safetensors --dataset fashion-mnist --data-dir DIR
    python -m trainer.evaluate knn --pixels

Prints one JSON object: protocol, features, top1, the setting chosen on held-out training images, and top1 on these.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from trainer.data import DATASETS, DECODED, SYNTHETIC, load_dataset
from trainer.evaluate import FeatureSet, encoder_features, pixel_features
from trainer.evaluate.table import PROTOCOLS
from trainer.model import load_encoder
from trainer.run.directory import CONFIG_FILE, ENCODER_FILE, read_settings
from weightserver.common.atomic_files import to_path


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 with one line on stderr for bad input."""
    options = _parser().parse_args(arguments)
    try:
        path = options.run / ENCODER_FILE if options.run else options.encoder
        dataset_name, directory = (options.dataset, None) if options.dataset else _data_of_run(options.run)
        name, features = _features(path, dataset_name, options.data_dir or directory)
        result = PROTOCOLS[options.protocol](features)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"protocol": options.protocol, "features": name} | asdict(result)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("protocol", choices=sorted(PROTOCOLS), help="how to classify features")
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--run", type=to_path, metavar="DIR", help=f"the directory of a run that has ended, with its {ENCODER_FILE}"
    )
    subject.add_argument("--encoder", type=to_path, metavar="FILE", help="an encoder file that the trainer wrote")
    subject.add_argument("--pixels", action="store_true", help="raw pixels, for comparison")
    parser.add_argument(
        "--dataset", choices=sorted([*DATASETS, *DECODED]), help="data set (default: the run's, or fashion-mnist)"
    )
    parser.add_argument("--data-dir", type=to_path, metavar="DIR", help="folder of the data set (default: the run's)")
    return parser


def _data_of_run(run: Path | None) -> tuple[str, Path | None]:
    """Name and folder of a run's data set; fashion-mnist without a run."""
    if run is None or not (run / CONFIG_FILE).is_file():
        return "fashion-mnist", None
    settings = read_settings(run)
    name, directory = settings.get("dataset", "fashion-mnist"), settings.get("data_dir")
    if name == SYNTHETIC:
        raise ValueError(f"{run} was trained on generated images, which have no labels: give another --dataset")
    return str(name), Path(directory) if directory else None


def _features(encoder_path: Path | None, dataset_name: str, directory: Path | None) -> tuple[str, FeatureSet]:
    if encoder_path is None:
        dataset = load_dataset(dataset_name, directory)
        dataset.check_labelled(tested=True)
        return "raw pixels", pixel_features(dataset)
    encoder, config = load_encoder(encoder_path)
    dataset = load_dataset(dataset_name, directory, image_size=config.image_size)
    dataset.check_labelled(tested=True)
    channels, side = dataset.test_images.shape[1], dataset.evaluated_side or dataset.test_images.shape[-1]
    if (channels, side) != (config.in_channels, config.image_size):
        raise ValueError(
            f"{encoder_path} is for {config.in_channels}-channel {config.image_size} px images, but the data set has "
            f"{channels}-channel {side} px ones: choose another --dataset"
        )
    return str(encoder_path), encoder_features(encoder, dataset, config.pixels)


if __name__ == "__main__":
    sys.exit(main())
