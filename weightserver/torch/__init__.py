"""A classifier of any number of classes as a torch module (extra `torch`); its rows live on the weight servers.

Import from it: `ClassifierHead` and `WindowSampler`, for training loops; the trainer also takes the parts they are made
of, all names below.
It may import: `common`, `core`, and the public names of the package above it.
"""

from importlib.util import find_spec

from weightserver.common.installing import install_advice

if find_spec("torch") is None:
    raise ModuleNotFoundError(f"weightserver.torch needs torch: {install_advice('torch')}", name=__name__)

from weightserver.torch.class_order import ClassOrder, read_labels
from weightserver.torch.head import ClassifierHead
from weightserver.torch.looking import Evaluation
from weightserver.torch.loss import Loss, cosine_softmax_loss, padded, padded_rows, softmax_loss
from weightserver.torch.margins import MARGINS, NO_MARGIN, Margin, MarginKind, margin_of
from weightserver.torch.negatives import NEGATIVES, Negatives, NegativeSampler
from weightserver.torch.ranks import Ranks, gathered
from weightserver.torch.rates import LearningRates
from weightserver.torch.recency import visited_before
from weightserver.torch.rows import DenseRows, RemoteRows, ResidentRows, RowCounters, RowStore
from weightserver.torch.sampler import WindowSampler
from weightserver.torch.saved_rows import SavedRows
from weightserver.torch.settings import Rows, Servers
from weightserver.torch.step import Announced
from weightserver.torch.transfer import HostCopy, to_device
from weightserver.torch.windows import RangesOrder, RowOrder, VisitSchedule

__all__ = [
    "MARGINS",
    "NEGATIVES",
    "NO_MARGIN",
    "Announced",
    "ClassOrder",
    "ClassifierHead",
    "DenseRows",
    "Evaluation",
    "HostCopy",
    "LearningRates",
    "Loss",
    "Margin",
    "MarginKind",
    "NegativeSampler",
    "Negatives",
    "RangesOrder",
    "Ranks",
    "RemoteRows",
    "ResidentRows",
    "RowCounters",
    "RowOrder",
    "RowStore",
    "Rows",
    "SavedRows",
    "Servers",
    "VisitSchedule",
    "WindowSampler",
    "cosine_softmax_loss",
    "gathered",
    "margin_of",
    "padded",
    "padded_rows",
    "read_labels",
    "softmax_loss",
    "to_device",
    "visited_before",
]
