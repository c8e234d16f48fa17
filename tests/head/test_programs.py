"""Random programs of a head's calls train exactly as dense torch.optim.SGD over all classes does, wherever rows are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.head.conftest import MakeHead
from tests.helpers.failing_steps import Failure
from tests.helpers.own_loop import INPUTS, NUM_CLASSES, Dense, Encoder, Images, Result, loaded
from weightserver.torch import ClassifierHead, WindowSampler
from weightserver.torch.step import Step

STEPS, MAX_NORM = 14, 3.0
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 40))]
Batches = list[list[int]]
"""The classes of the batches of a step."""


@dataclass
class Oracle:
    """All classes in one matrix, and an encoder of its own."""

    dense: Dense
    encoder: Encoder = field(default_factory=Encoder)
    losses: list[float] = field(default_factory=list)
    is_drawn: bool = False
    """Whether the sampler drew the last step."""

    def see(self, batches: Batches, sampler: WindowSampler) -> None:
        """Makes the classes of the next step recent; at the first step that the sampler draws, those before it too."""
        number = len(self.losses)
        drawn = [sampler.images(number, part).tolist() for part in range(sampler.batches_per_step)] == batches
        if drawn and not self.is_drawn:
            steps = range(number - 20, number)
            self.dense.visits = [image for step in steps for image in sampler.classes_of_step(step).tolist()]
        self.is_drawn = drawn
        self.dense.visits += [class_ for ids in batches for class_ in ids]

    def step(self, batches: Batches, views: int, rate: float, max_norm: float | None) -> Tensor | None:
        norm = None
        self.losses.append(0.0)
        for ids in batches:
            for embeddings in self.encoder.views(INPUTS[ids], views):
                loss = self.dense.loss(embeddings, ids) / views
                loss.backward()
                self.losses[-1] += loss.item()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_([*self.encoder.module.parameters(), self.dense.weight], max_norm)
        self.encoder.update(rate)
        self.dense.update(rate)
        return norm

    def skip(self, rate: float) -> None:
        self.losses.append(0.0)
        self.dense.update(rate)

    def result(self) -> Result:
        return Result(self.losses, self.dense.weight.detach().clone(), self.encoder.weight())


class Program:
    """A head's training by random calls, and what the oracle makes of the same steps."""

    def __init__(self, make_head: Callable[[], ClassifierHead], seed: int) -> None:
        self.make_head = make_head
        self.random, self.random_looks = np.random.default_rng(seed), np.random.default_rng(seed)
        self.encoder, self.losses = Encoder(), list[float]()
        scale = float(self.random.choice([1.0, 256.0]))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=self.chance(0.4))
        self.parts, self.views = (int(number) for number in self.random.integers(1, 3, size=2))
        self.window: dict[str, Any] = {"batch_size": int(self.random.integers(1, 5)), "batches_per_step": self.parts}
        if self.chance(0.8):
            self.window |= {"window_size": int(self.random.integers(8, NUM_CLASSES)), "window_stride": 3}
        self.states: list[Any] = []
        self.loads = 3
        self.begin()
        self.oracle = Oracle(Dense(self.head))

    def begin(self) -> None:
        self.head = self.make_head()
        self.sampler = self.head.sampler(**self.window)

    def run(self) -> Result:
        actions = [self.steps_of_any_loop, self.steps_announced_by_hand, self.iteration, self.iteration, self.load]
        while self.head.num_steps < STEPS:
            actions[self.random.integers(len(actions))]()
            self.look()
        return Result(self.losses, self.head.rows(range(NUM_CLASSES)), self.encoder.weight())

    @property
    def has_states(self) -> bool:
        return self.head._table._rows.where != "dense"

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def rate(self) -> float:
        return float(self.random.choice([0.3, 0.3, 0.1, 0.2]))

    def batches(self) -> Batches:
        """Of any classes, some of them twice; sometimes the same batch twice."""
        size = self.random.integers(1, 5)
        found: Batches = [self.random.integers(NUM_CLASSES, size=size).tolist() for _ in range(self.parts)]
        return found[:1] * self.parts if self.chance(0.2) else found

    def look(self) -> None:
        """Rows are the oracle's in the middle of a step too."""
        if self.random_looks.random() < 0.7:
            return
        ids = self.random_looks.integers(NUM_CLASSES, size=6)
        if self.random_looks.random() < 0.5:
            torch.testing.assert_close(self.head.rows(ids), self.oracle.dense.weight.detach()[ids], rtol=0, atol=3e-5)
        else:
            self.head.eval()
            with torch.inference_mode():
                self.head.evaluate(INPUTS[ids, :6], ids, classes="recent" if ids[0] % 2 else "all")
                self.head.predict(INPUTS[ids, :6], 2)
            self.head.train()

    # ---- a step

    def passes(self, batches: Batches, *, in_blocks: bool = False) -> None:
        self.losses.append(0.0)
        for ids in batches:
            with self.head.step_of(ids) if in_blocks else nullcontext():
                for view, embeddings in enumerate(self.encoder.views(INPUTS[ids], self.views)):
                    loss = self.head(embeddings, ids, view=view) / self.views
                    self.look()
                    self.scaler.scale(loss).backward()
                    self.losses[-1] += loss.item()

    def fails(self, batches: Batches, *, is_announced: bool) -> bool:
        """Lets an attempt at the step fail; returns whether the batches are left out, or the step is skipped."""
        in_block, number = self.chance(0.5) or not (is_announced or len(batches) == 1), len(self.losses)
        with suppress(Failure), self.head.step_of(*batches) if in_block else nullcontext():
            made = self.random.integers(0 if in_block else 1, len(batches) + 1)
            self.passes(batches[:made])
            if made == len(batches):
                self.end_in_vain()
            if made or self.chance(0.5):  # a block in which nothing was done has failed too
                raise Failure
        del self.losses[number:]
        self.encoder.optimizer.zero_grad()
        if not in_block:
            self.head.zero_grad()
        self.look()
        if self.chance(0.4):
            return False
        if is_announced or self.chance(0.5):
            self.skip(batches)
        return True

    def skip(self, batches: Batches) -> None:
        rate = self.rate()
        self.head.skip(rate)
        self.losses.append(0.0)
        self.oracle.see(batches, self.sampler)
        self.oracle.skip(rate)

    def step(self, batches: Batches, *, is_announced: bool, at_the_end: Callable[[], object] = lambda: None) -> None:
        self.look()
        self.save_at_times(self.losses)
        if self.chance(0.25) and self.fails(batches, is_announced=is_announced):
            at_the_end()
            return
        if is_announced and self.head._steps.current is None and self.chance(0.1):
            self.skip(batches)
            at_the_end()
            return
        rate, max_norm = self.rate(), MAX_NORM if self.chance(0.3) else None
        needs_block = not is_announced and len(batches) > 1
        block: AbstractContextManager[object] = nullcontext()
        if needs_block or self.chance(0.3):
            block = self.head.step_of(*batches)
        with block:
            has_parts = is_announced and len(batches) > 1 and isinstance(block, nullcontext)
            self.passes(batches, in_blocks=has_parts and self.chance(0.2))
            self.save_at_times(self.losses[:-1])
            if overflows := self.scaler.is_enabled() and self.chance(0.2):
                self.spoil()
            at_the_end()
            if forgets := not is_announced and self.chance(0.3):
                for _ in range(2):
                    self.head.forget_announced()
                    self.head.announce(*self.batches())
            if self.chance(0.1):
                with suppress(Failure):
                    self.end_in_vain()
            norm = self.end(rate, max_norm)
            self.encoder.optimizer.param_groups[0]["lr"] = rate
            self.scaler.step(self.encoder.optimizer)
            scale = self.scaler.get_scale()
            self.scaler.update()
            assert self.scaler.get_scale() == scale / (2 if overflows else 1)
            self.encoder.optimizer.zero_grad()
        if forgets:
            self.head.forget_announced()
        self.oracle.see(batches, self.sampler)
        if overflows:
            self.losses[-1] = 0.0
            self.oracle.skip(rate)
            return
        torch.testing.assert_close(norm, self.oracle.step(batches, self.views, rate, max_norm))

    def spoil(self) -> None:
        """Lets a gradient of the rows or of the encoder overflow."""
        step = self.head._steps.current
        assert step is not None
        of_rows = self.random.random() < 0.5
        values = step.weight if of_rows else next(self.encoder.module.parameters())
        assert values is not None
        assert values.grad is not None
        values.grad[0, 0] = float("inf")

    def end(self, rate: float, max_norm: float | None) -> Tensor | None:
        return self.head.step(rate, optimizer=self.encoder.optimizer, max_norm=max_norm, scaler=self.scaler)

    def end_in_vain(self) -> None:
        """Fails just before the rows are updated, by another learning rate."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Step, "update", fail)
            self.end(self.rate() / 2, None)

    # ---- loops

    def steps_of_any_loop(self) -> None:
        for _ in range(self.random.integers(1, 4)):
            self.step(self.batches()[: 1 if self.chance(0.5) else None], is_announced=False)

    def steps_announced_by_hand(self) -> None:
        """Further ahead than rows are requested; the last ones may be forgotten, what failed before is left out."""
        if self.chance(0.4):
            self.fails(self.batches(), is_announced=False)
        steps = [self.batches() for _ in range(self.random.integers(1, 7))]
        for batches in steps:
            self.head.announce(*batches)
        made = self.random.integers(len(steps) + 1)
        for batches in steps[:made]:
            self.step(batches, is_announced=True)
        self.head.forget_announced()

    def iteration(self) -> None:
        """Of windows or of any classes, announced or not; left early, perhaps in the middle of a step."""
        stop = self.head.num_steps + self.random.integers(1, 6)
        loader: Any = DataLoader(Images(), batch_sampler=self.sampler)
        announces = self.chance(0.7) or self.parts > 1
        if self.chance(0.5):
            loader = loaded(ids for _ in range(6) for ids in self.batches())
        coming = iter(self.head.announced(loader, batches_per_step=self.parts) if announces else loader)
        ahead, following = self.chance(0.5) and self.parts == 1, list[Batches]()
        while self.head.num_steps < stop and (batches := following.pop() if following else self.taken(coming)):
            self.step(
                batches,
                is_announced=announces,
                at_the_end=lambda: following.append(self.taken(coming)) if ahead else None,
            )
        if announces and self.chance(0.5) and (batches := following.pop() if following else self.taken(coming)):
            self.passes(batches[:1])
            self.losses.pop()
            self.encoder.optimizer.zero_grad()
        if self.chance(0.5):
            self.head.forget_announced(in_progress=True)
        else:
            iter(self.head.announced([]))

    def taken(self, coming: Iterator[Any]) -> Batches:
        """The batches of the next step; none at the end."""
        return [ids.tolist() for _, (ids, _) in zip(range(self.parts), coming, strict=False)]

    # ---- states

    def save_at_times(self, losses: list[float]) -> None:
        """With the losses of the steps that ended: a state in the middle of a step is that before it."""
        if self.has_states and self.chance(0.15):
            if not self.head.num_steps:
                self.head.checkpoint()  # a head before its first use names no rows
            state, of_encoder = self.head.state_dict(), (self.encoder.module, self.encoder.optimizer)
            self.states.append((state, copy.deepcopy((of_encoder, losses, self.oracle))))

    def load(self) -> None:
        """In this head or another one; later states are gone."""
        if not self.states or not self.loads:
            return
        self.loads -= 1
        del self.states[self.random.integers(len(self.states)) + 1 :]
        if self.chance(0.5):
            self.head.close()
            self.begin()
        state, kept = self.states[-1]
        self.head.load_state_dict(state)
        (self.encoder.module, self.encoder.optimizer), self.losses, self.oracle = copy.deepcopy(kept)
        self.oracle.is_drawn = False


def fail(*_: object) -> None:
    raise Failure


def maker(make_head: MakeHead, rows: str, seed: int) -> Callable[[], ClassifierHead]:
    """Some have just enough room for their rows, some other settings of the rows and the loss."""
    ahead = (8, 0, 1)[seed % 3]
    least = None if ahead == 8 else 12 + ahead * 8 + seed % 2
    settings: dict[str, Any] = {"capacity": least, "prefetch_steps": ahead} if rows == "resident" else {}
    others: tuple[dict[str, Any], ...] = (
        {"learning_rate_factor": 1.5},
        {"correction": False},
        {"softmax": "plain", "momentum": 0.0},
    )
    settings |= others[seed % 4 - 1] if seed % 4 else {}
    return lambda: make_head(rows, **settings)


@pytest.mark.parametrize("rows", ["dense", "resident", "remote"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_trains_as_dense_sgd_does(make_head: MakeHead, rows: str, seed: int) -> None:
    program = Program(maker(make_head, rows, seed), seed)
    program.run().assert_close(program.oracle.result())
