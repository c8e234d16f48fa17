"""Every protocol that trains: what an interruption and several ranks must not change.

As a script (under torchrun) this file is one rank, which writes its results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from experiments.paper.detect import detect
from experiments.paper.segment import segment
from experiments.paper.settings import DetectConfig, SegmentConfig
from tests.helpers import voc_tree
from tests.helpers.evaluations import (
    RESNET,
    Convolution,
    SeesRows,
    interrupted_evaluation,
    made_evaluation,
    outcomes_of_ranks,
    small_resnet,
    write_outcome,
)
from tests.helpers.made_cityscapes import make_cityscapes
from trainer.distributed import process_group
from trainer.evaluate.classification import fine_tune, linear
from trainer.evaluate.encoders import encoder_of
from trainer.evaluate.evaluation import Evaluation, Outcome
from trainer.evaluate.knn import knn
from trainer.evaluate.options import EncoderOptions
from trainer.evaluate.settings import SEMI_SUPERVISED, FineTuneConfig, KnnConfig, LinearConfig
from trainer.evaluate.training import synchronise_batch_norm
from trainer.model import EncoderConfig, build_model, save_encoder
from weightserver.torch import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")
DETECT = DetectConfig(
    iterations=3,
    batch_size=2,
    learning_rate=0.01,
    learning_rate_drops=(2,),
    warmup_iterations=0,
    train_sides=(64, 72),
    test_side=72,
    max_side=100,
    anchor_sides=(24, 32),
    anchors_per_image=32,
    rois_per_image=8,
    roi_side=4,
    train_proposals=(100, 16),
    test_proposals=(60, 12),
    precise_norm_batches=2,
    save_every=1,
)


class Case(NamedTuple):
    """A protocol, its encoder, and a part at which it is interrupted: of those that the display is told of."""

    run: Callable[[Evaluation], Outcome]
    encoder: Callable[[], nn.Module]
    fails_at: int
    data: Callable[[Path], Path] | None = None

    def evaluation(self, directory: Path, ranks: Ranks | None = None) -> Evaluation:
        if self.data is None:
            return made_evaluation(self.encoder(), directory, ranks=ranks)
        data_dir = directory.parent / "data"
        if not data_dir.exists():
            self.data(data_dir)
        return made_evaluation(self.encoder(), directory, ranks=ranks, config=RESNET, data_dir=data_dir)


CASES = {
    "linear": Case(partial(linear, config=LinearConfig(epochs=3, batch_size=32, learning_rates=(1.0,))), SeesRows, 16),
    "no-momentum": Case(
        partial(linear, config=LinearConfig(epochs=3, batch_size=32, learning_rates=(0.5, 1.0), momentum=0.0)),
        SeesRows,
        16,
    ),
    "fine-tune": Case(
        partial(fine_tune, config=FineTuneConfig(epochs=2, batch_size=32, learning_rates=(0.05,), temperature=0.1)),
        Convolution,
        17,
    ),
    "semi-supervised": Case(
        partial(
            fine_tune,
            config=replace(SEMI_SUPERVISED, labels=0.5, epochs=4, batch_size=30, learning_rates=(0.1, 0.3)),
        ),
        Convolution,
        12,
    ),
    "segment": Case(
        partial(
            segment, config=SegmentConfig(iterations=4, batch_size=3, crop_size=33, learning_rate=1e-4, save_every=2)
        ),
        small_resnet,
        4,
        make_cityscapes,
    ),
    "detect": Case(partial(detect, config=DETECT), small_resnet, 3, voc_tree.tree),
}


def states(directory: Path) -> dict[str, Tensor]:
    return {
        f"{path.name} {name}": value
        for path in sorted(directory.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.guard
@pytest.mark.parametrize("name", CASES)
def test_an_interrupted_training_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    whole, interrupted = (case.evaluation(tmp_path / place) for place in ("whole", "interrupted"))
    expected = case.run(whole)
    outcome, seen = interrupted_evaluation(case.run, interrupted, fails_at=case.fails_at)
    assert outcome == expected
    assert seen[0][1] > 0, "a part that was done was not omitted"
    found, wanted = states(interrupted.state), states(whole.state)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, found[key]) for key, value in wanted.items())
    file = next(interrupted.state.glob("*.safetensors"))
    file.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"cannot read the state .*\.safetensors \(.*\): remove it to start over"):
        case.run(interrupted)


def of_all(directory: Path, ranks: Ranks | None = None) -> Outcome:
    """Results of all protocols whose result is that of one rank, of an encoder whose file the first rank alone has."""
    found, path = dict[str, float](), directory / "encoder.safetensors"
    if ranks is None or ranks.is_first:
        save_encoder(build_model(EncoderConfig(), seed=1).encoder, EncoderConfig(), path)
    given = path if ranks is None or ranks.is_first else Path("on another machine")
    encoder = encoder_of(EncoderOptions(encoder=given), ranks or Ranks())
    assert (encoder.name, encoder.config) == (str(path), EncoderConfig())
    pixels = encoder_of(EncoderOptions(pixels=True), ranks or Ranks())
    assert (pixels.name, pixels.module) == ("raw pixels", None)
    found |= {name: float(value.double().sum()) for name, value in encoder.network.state_dict().items()}
    if ranks is not None:
        own = made_evaluation(SeesRows(), directory / f"of rank {ranks.rank}", ranks=ranks)
        with pytest.raises(ValueError, match=r"not all ranks see .*: give --output, a folder that they share"):
            replace(own, state=own.state / str(ranks.rank)).prepare_state()
    for name, case in CASES.items():
        if name not in ("detect", "no-momentum"):
            results = case.run(case.evaluation(directory / name, ranks)).results
            found |= {f"{name} {key}": value for key, value in results.items()}
    found |= knn(made_evaluation(SeesRows(), directory / "knn", ranks=ranks), KnnConfig()).results
    return Outcome(results=found)


@pytest.mark.guard
def test_two_ranks_have_the_result_of_one(tmp_path: Path) -> None:
    """BatchNorm uses the whole batch; neither all batches nor 61 test images divide by two."""
    (tmp_path / "one").mkdir()
    alone = of_all(tmp_path / "one")
    both = outcomes_of_ranks("tests.trainer.evaluate.test_training", 2, tmp_path / "two")
    for name, bound in (("linear", 1e-3), ("fine-tune", 1e-3), ("segment", 0.03)):
        of_one, of_two = (states(tmp_path / place / name) for place in ("one", "two"))
        assert of_one.keys() == of_two.keys()
        for key, value in of_one.items():
            # float32 sums in another order. By these a ReLU may open in one of them: in the last steps of "segment"
            # that is 0.012 of the momentum, as if its weights are rounded otherwise. A BatchNorm of each rank's own
            # images is as far off as the values themselves.
            difference = (of_two[key].double() - value.double()).norm()
            assert difference <= bound * value.double().norm().clamp(min=1e-2), f"{name} {key}"
    for found in both:
        assert found == both[0]
        assert found.results == pytest.approx(alone.results, abs=0.5)
        assert found.details == pytest.approx(alone.details)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rejects_a_batch_norm_that_cannot_be_synchronised(device: str) -> None:
    """On a GPU, torch would replace it by a SyncBatchNorm without what it adds."""

    class Other(nn.BatchNorm2d):
        pass

    ranks = Ranks(world_size=2, device=torch.device(device))
    with pytest.raises(ValueError, match="Other of the encoder cannot be synchronised: evaluate on a single rank"):
        synchronise_batch_norm(nn.Sequential(nn.BatchNorm1d(2), Other(2)), ranks)


if __name__ == "__main__":
    with process_group(torch.device("cpu")) as ranks:
        write_outcome(of_all(Path(sys.argv[1]), ranks), Path(sys.argv[1]), ranks.rank)
