"""Who pays for the execution of a step: the rule in one place.

Token share: each token that a step computes carries the same part of its execution time. It is a
simple rule and not a counterfactual: it does not say what the step would have cost without the
others, and a decode token that reads a long context weighs the same as one that does not.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .tables import Int64
from .taxonomy import CELL_INDEX

SAMPLING_CELL: Final = CELL_INDEX["model.sampling"]
CHARGED_CELLS: Final = np.array(
    [
        CELL_INDEX["model.recompute"],
        CELL_INDEX["model.prefill"],
        CELL_INDEX["model.prefill_interference"],
        CELL_INDEX["model.batch_decode"],
        CELL_INDEX["model.decode"],
    ],
    np.int64,
)
"""Cells of the columns of :func:`split_execution`, in the order in which they are laid out."""


def split_execution(
    exec_ns: Int64, prefill_tokens: Int64, decode_tokens: Int64, own_prefill: Int64, own_recompute: Int64
) -> Int64:
    """Split execution time among the causes, from the view of one request; shape (n, 5) in ns.

    ``prefill_tokens`` and ``decode_tokens`` are the step's, ``own_*`` the part of the prefill tokens
    that is the request's own (0: it only decodes in this step). Every row sums to its ``exec_ns``:

    1. Other requests' prompt tokens: ``exec_ns * others // all`` is interference.
    2. Only decoding: the rest is its decode.
    3. With own prompt tokens: the decode tokens' share, rounded down, is batch_decode; what is left
       is its own, divided between recompute (rounded down) and prefill.
    """
    own = np.minimum(own_prefill + own_recompute, prefill_tokens)
    own_again = np.minimum(own_recompute, own)
    computes = (own_prefill + own_recompute) > 0
    total = prefill_tokens + decode_tokens
    parts = np.zeros((len(exec_ns), 5), np.int64)
    parts[:, 2] = _share(exec_ns, prefill_tokens - own, total)
    parts[:, 3] = np.where(computes, _share(exec_ns, decode_tokens, total), 0)
    rest = exec_ns - parts[:, 2] - parts[:, 3]
    only_again = computes & (own_prefill == 0)
    parts[:, 0] = np.where(only_again, rest, np.where(computes, _share(rest, own_again, own), 0))
    parts[:, 1] = np.where(computes, rest - parts[:, 0], 0)
    parts[:, 4] = np.where(computes, 0, rest)
    return parts


def _share(time_ns: Int64, tokens: Int64, total: Int64) -> Int64:
    """``time_ns * tokens // total`` without leaving int64 (tokens <= total < 2**32); 0 if total is 0."""
    total = np.maximum(total, 1)
    whole, rest = np.divmod(time_ns, total)
    return whole * tokens + rest * tokens // total
