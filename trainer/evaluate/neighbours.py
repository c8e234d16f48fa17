"""Nearest neighbours by cosine similarity, for banks and queries that do not fit the device, and their votes."""

import torch
import torch.nn.functional as F
from torch import Tensor

BANK_ROWS = 32_768
"""Bank features compared at a time: 256 MiB in float32 for features of 2,048 values."""
QUERY_ROWS = 1_024
"""Queries compared at a time: with BANK_ROWS, 128 MiB of similarities."""
_MOST_VOTES = 1 << 26
"""Sums of votes at a time, one for each class and query: 256 MiB."""


def nearest(
    bank: Tensor,
    queries: Tensor,
    num_neighbours: int,
    *,
    excluded: Tensor | None = None,
    device: torch.device | str = "cpu",
    bank_rows: int = BANK_ROWS,
    query_rows: int = QUERY_ROWS,
) -> tuple[Tensor, Tensor]:
    """Returns the nearest bank features of each query: cosine float32 [M, k] in falling order, index int64 [M, k].

    Bank [N, d] and queries [M, d] may have any floating dtype and be mapped files: one block of each is read at a time,
    and compared on `device` in float32. Apart from these blocks only the result takes memory.

    Args:
        excluded: bool [N], bank features that count as no one's neighbour.

    Raises:
        ValueError: fewer than num_neighbours features in the bank, or num_neighbours below 1.
    """
    size = len(bank) - (0 if excluded is None else int(excluded.sum()))
    if not 1 <= num_neighbours <= size:
        raise ValueError(f"num_neighbours must lie in 1..{size}, the size of the bank, got {num_neighbours}")
    similarity = torch.full((len(queries), num_neighbours), -torch.inf)
    index = torch.zeros((len(queries), num_neighbours), dtype=torch.int64)
    for start in range(0, len(bank), bank_rows):
        keys = _unit(bank[start : start + bank_rows], device)  # (N', d)
        for first in range(0, len(queries), query_rows):
            rows = slice(first, first + query_rows)
            cosine = _unit(queries[rows], device) @ keys.T  # (M', N')
            if excluded is not None:
                cosine[:, excluded[start : start + bank_rows].to(device)] = -torch.inf
            found, where = cosine.topk(min(num_neighbours, len(keys)))
            both = torch.cat([similarity[rows], found.cpu()], dim=1)
            both_index = torch.cat([index[rows], where.cpu() + start], dim=1)
            similarity[rows], kept = both.topk(num_neighbours)
            index[rows] = both_index.gather(1, kept)
    return similarity, index


def predict(
    similarity: Tensor, labels: Tensor, num_classes: int, *, k: int, temperature: float, top: int = 5
) -> Tensor:
    """Returns the `top` classes of most votes: int64 [M, top] in falling order; −1 stands for classes without a vote.

    A neighbour of cosine similarity s has exp(s / temperature) votes (Wu et al., 1805.01978, section 3.4). All votes of
    a query are divided by that of its nearest neighbour, which keeps them finite and changes no order.

    Args:
        similarity: float32 [M, ≥ k] in falling order.
        labels: int64 [M, ≥ k], of the same neighbours.
    """
    found, rows = [], max(1, min(QUERY_ROWS, _MOST_VOTES // num_classes))
    blocks = zip(torch.split(similarity[:, :k], rows), torch.split(labels[:, :k], rows), strict=True)
    for cosine, of_neighbours in blocks:
        weight = ((cosine - cosine[:, :1]) / temperature).exp()
        votes, classes = (
            torch.zeros(len(cosine), num_classes).scatter_add_(1, of_neighbours, weight).topk(min(top, num_classes))
        )
        found.append(classes.masked_fill(votes <= 0, -1))
    return torch.cat(found)


def _unit(features: Tensor, device: torch.device | str) -> Tensor:
    return F.normalize(features.to(device).float())
