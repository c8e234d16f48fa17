"""Cityscapes by a small ResNet: coloured regions are learned, resumption, ranks, and damaged data.

As a script (under torchrun) this file is one rank: it prints its result for the data set in the given folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.models.resnet import BasicBlock, ResNet

from trainer.distributed import Ranks, process_group
from trainer.evaluate.segment import SegmentConfig, SegmentResult, segment
from trainer.model import EncoderConfig, TorchvisionEncoder

pytestmark = pytest.mark.usefixtures("one_thread")
