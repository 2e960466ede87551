"""Random splits of the roads, as Wang et al. (2019) draw them."""

import numpy as np
import torch

from pipelines.reproduce._experiment import Request
from pipelines.reproduce.ciq._problem import Observation, Problem, standardised

#: Of the data: 4/9 train and 2/9 validate, which here train as well.
TRAIN = 2 / 3
START, BATCH = 0.1, 256
_QUICK = 600


def split(request: Request, seed: int) -> Problem:
    """Altitude against longitude and latitude, by the moments of the training data."""
    with np.load(request.file("3droad_first5000.npz")) as table:
        x, y = (torch.from_numpy(table[name].astype(np.float64)) for name in ("X", "y"))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    if request.quick:
        order = order[:_QUICK]
    n = round(TRAIN * len(order))
    train, test = order[:n], order[n:]
    x_train, x_test = standardised(x[train], x[test])
    y_train, y_test = standardised(y[train], y[test])
    return Problem("roads", Observation.GAUSSIAN, x_train, y_train, x_test, y_test, START, BATCH)
