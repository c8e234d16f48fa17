"""A classifier of any number of classes as a torch module (extra `torch`); its rows live on the weight servers.

Import from it: for training loops, what docs/api.md describes; the trainer also takes some of the parts that these are
made of.
It may import: `common`, `core`, and the public names of the package above it.
"""

from importlib.util import find_spec

from weightserver.common.installing import install_advice

if find_spec("torch") is None:
    raise ModuleNotFoundError(f"weightserver.torch needs torch: {install_advice('torch')}", name=__name__)

from weightserver.torch.class_order import ClassOrder, read_labels
from weightserver.torch.head import ClassifierHead
from weightserver.torch.looking import Evaluation
from weightserver.torch.loss import Loss, padded
from weightserver.torch.margins import Margin, margin_of
from weightserver.torch.negatives import NegativeSampler
from weightserver.torch.ranks import Ranks, gathered
from weightserver.torch.rows import RowCounters
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.saved_rows import SavedRows
from weightserver.torch.settings import Rows, Servers
from weightserver.torch.step import Announced
from weightserver.torch.transfer import HostCopy, to_device
from weightserver.torch.windows import RangesOrder, VisitSchedule

__all__ = [
    "Announced",
    "ClassOrder",
    "ClassifierHead",
    "Evaluation",
    "HostCopy",
    "Loss",
    "Margin",
    "NegativeSampler",
    "RangesOrder",
    "Ranks",
    "RowCounters",
    "Rows",
    "SavedRows",
    "Servers",
    "VisitSchedule",
    "WindowSampler",
    "gathered",
    "margin_of",
    "padded",
    "read_labels",
    "to_device",
]
