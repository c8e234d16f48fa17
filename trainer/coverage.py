"""Which images a run visits, and which of their rows it meets again: a function of N, W, S and its length."""

from __future__ import annotations

import math

from trainer.config import TrainConfig
from weightserver.common.logs import Remark


def coverage_warnings(config: TrainConfig, num_images: int) -> list[Remark]:
    """Warnings about a run that does not visit all images, or whose rows never return to the window."""
    window, stride = config.sampling.window_size, config.sampling.window_stride
    visits = config.optimization.num_steps(num_images) * config.optimization.batch_size
    windows, later = max(1, -(-visits // window)), max(0, visits - window)
    # of the last window's new images, as many as of its visits; images are counted again in each pass over them
    reached = min(window, visits) - -later * stride // window
    values = {"visits": visits, "windows": windows, "window": window, "stride": stride}
    values |= {"images": num_images, "reached": reached}
    length = f"{visits:,} visits fill {windows:,} windows of {window:,} images that move by {stride:,}"
    if reached < num_images:
        needed = -(-(num_images - window) * window // later) if later else window + 1
        visits_needed = window * (1 + math.ceil((num_images - window) / stride))
        ways = [_longer(config, visits_needed, num_images)]
        if window < num_images:
            ways.insert(
                0, f"--window-stride {needed}" if needed <= window else "a larger --window-size and --window-stride"
            )
        lost = ", and no row returns" if config.sampling.labels is None else ""
        line = f"the run visits only {reached:,} of {num_images:,} images{lost}: {length}. To visit all: "
        return [Remark(line + ", or ".join(ways), **values)]
    if reached == num_images and config.sampling.labels is None:
        more = "--epochs" if config.optimization.steps is None else "--steps"
        line = (
            f"no row returns to the window after it has left it, so that each row learns once: {length}. More {more} "
            "or a larger --window-stride bring rows back"
        )
        return [Remark(line, **values)]
    return []


def _longer(config: TrainConfig, visits: int, num_images: int) -> str:
    """The setting of a run with at least `visits` visits, which come in whole batches."""
    steps = -(-visits // config.optimization.batch_size)
    if config.optimization.steps is not None:
        return f"--steps {steps}"
    return f"--epochs {_rounded_up(steps * config.optimization.batch_size / num_images):g}"


def _rounded_up(number: float) -> float:
    """Rounds up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit - 1e-9) * unit
