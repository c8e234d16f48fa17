"""What is observed of a run while it trains: records of its steps, monitors and kNN evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainer.config import TrainConfig
from trainer.evaluate.knn_probe import KnnProbe
from trainer.monitors import Monitors, Update
from trainer.run.recorder import Recorder


@dataclass(frozen=True)
class Observer:
    """Watches each update; every rank calls all methods. The run is the same to the bit without it."""

    config: TrainConfig
    num_images: int
    recorder: Recorder
    monitors: Monitors
    knn: KnnProbe | None
    steps: range

    def begin(self) -> None:
        """Evaluates the encoder that the run began with, unless a record has that."""
        if self.knn is not None and lacks_beginning(self.steps, self.config.report.log_every):
            with self.recorder.paused("kNN evaluation"):
                self.knn.observe_beginning()

    def before_update(self, step: int) -> None:
        """Measures the gradient of a step that will be recorded: optimizers of timm before 1.0.31 change it."""
        if self._is_recorded(step):
            self.monitors.measure_gradient()

    def _is_recorded(self, step: int) -> bool:
        return step + 1 == self.steps.stop or (step + 1) % self.config.report.log_every == 0

    def observe(self, step: int, update: Update, learning_rate: float, num_active: int) -> None:
        """Records the steps since the last record if one is due. Raises ValueError if a loss is not finite."""
        self.recorder.advance(step)
        self.monitors.keep(update.embeddings)
        if not self._is_recorded(step):
            return
        if not math.isfinite(loss := update.loss.item()):
            raise ValueError(f"the loss is {loss} at step {step}: try a lower --learning-rate")
        monitored = self.monitors.measure(update, num_active)
        record = self.recorder.measure(step, loss, learning_rate, num_active, monitored)
        if self.knn is not None:
            knn_steps = self.config.report.knn_every * self.num_images / self.config.optimization.batch_size
            due = is_due(knn_steps, step, self.config.report.log_every, step + 1 == self.steps.stop)
            with self.recorder.paused("kNN evaluation"):
                record |= self.knn.observe(due=due)
        self.recorder.write(record)


def lacks_beginning(steps: range, log_every: int) -> bool:
    """Whether a run has no record yet when it comes to these steps, so that it still evaluates its first encoder."""
    return steps.start < min(log_every, steps.stop)


def is_due(every_steps: float, step: int, log_every: int, last: bool) -> bool:
    """Whether a multiple of `every_steps` lies between this logged step and the previous one."""
    return last or (step + 1) // every_steps > max(0, step + 1 - log_every) // every_steps
