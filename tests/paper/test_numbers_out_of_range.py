"""What theory, error curves and sampling cannot compute with is named."""

import math

import pytest
import torch

from dofla.errors import DoflaError
from dofla.paper import theory
from dofla.paper.error_curve import error_curve, features_needed
from dofla.paper.sampling import leverage_features

GRAM = torch.eye(3)
LOGS = torch.zeros(3, 2)
ONES = torch.ones(2, 2)
NAN = math.nan


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.degrees_of_freedom(GRAM, 0.0), "lam=0.0"),
        (lambda: theory.log_leverage(LOGS, GRAM, -1.0), "lam=-1.0"),
        (lambda: theory.kernel_error_bound(GRAM, math.inf, 1.0, 3.0), "lam=inf"),
        (lambda: theory.integral_error_bound(GRAM, -1.0, 1.0, torch.ones(3)), "lam=-1.0"),
        (lambda: theory.degrees_of_freedom(torch.ones(2, 3), 1.0), r"gram has shape \[2, 3\]"),
        (lambda: theory.degrees_of_freedom(GRAM * NAN, 1.0), "gram holds nan"),
        (lambda: theory.degrees_of_freedom(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), 1.0), "transpose by 2"),
        (lambda: theory.degrees_of_freedom(-GRAM, 1.0), "eigenvalue -1"),
        (lambda: theory.log_leverage(torch.zeros(2, 2), GRAM, 1.0), r"shape \[2, 2\], expected \[3, Z\]"),
        (lambda: theory.log_leverage(LOGS * NAN, GRAM, 1.0), "log_features holds nan"),
        (lambda: theory.max_leverage(LOGS, GRAM, 1.0, torch.zeros(3)), r"log_density has shape \[3\], expected \[2\]"),
        (lambda: theory.max_leverage(LOGS, GRAM, 1.0, torch.tensor([0.0, NAN])), "log_density holds nan"),
        (lambda: theory.optimal_log_density(LOGS, GRAM * 0, 1.0), "gram is zero"),
        (lambda: theory.required_features(0.0, 1.0, 0.1), "max_leverage=0.0"),
        (lambda: theory.required_features(1.0, 0.0, 0.1), "t=0.0 is outside"),
        (lambda: theory.required_features(1.0, 3.01, 0.1), "t=3.01 is outside"),
        (lambda: theory.required_features(1.0, 1.0, 0.0), "delta=0.0 is outside"),
        (lambda: theory.kernel_error_bound(GRAM, 1.0, 4.0, 3.0), "t=4.0 is outside"),
        (lambda: theory.kernel_error_bound(GRAM, 1.0, 1.0, 0.5), "max_leverage=0.5 is below"),
        (lambda: theory.integral_error_bound(GRAM, 1.0, -1.0, torch.ones(3)), "t=-1.0 is outside"),
        (lambda: theory.integral_error_bound(GRAM, 1.0, 1.0, torch.ones(4)), r"values has shape \[4\]"),
        (lambda: theory.prf_log_features(torch.ones(0, 2), torch.ones(1, 2), 1.0), r"x has shape \[0, 2\]"),
        (lambda: theory.prf_log_features(torch.ones(2, 2), torch.ones(2), 1.0), r"z has shape \[2\]"),
        (lambda: theory.prf_log_features(torch.ones(2, 2), torch.ones(1, 3), 1.0), "z has width 3 but x has width 2"),
        (lambda: theory.prf_log_features(torch.ones(2, 2), torch.ones(1, 2), 0.0), "scaling=0.0"),
        (lambda: theory.prf_gram(torch.ones(2, 2) * NAN, 1.0), "x holds nan"),
        (lambda: theory.prf_log_trace(torch.ones(2, 0), 1.0), r"x has shape \[2, 0\]"),
        (lambda: error_curve(ONES, ONES, 1.0, seeds=1), "seeds is 1"),
        (lambda: error_curve(ONES, ONES, 1.0, sizes=()), r"sizes is \[\]"),
        (lambda: error_curve(ONES, ONES, 1.0, sizes=(0, 4)), r"sizes is \[0, 4\]"),
        (lambda: error_curve(ONES, ONES, 1.0, methods=("prf",)), "unknown method 'prf'"),
        (lambda: features_needed(ONES, 1.0, "orthogonal"), "unknown method 'orthogonal': choose iid or leverage"),
        (lambda: features_needed(ONES, 1.0, "iid", error=0.0), "error=0.0"),
        (lambda: leverage_features(ONES, 1.0, 0, 0.1), "features is 0"),
        (lambda: leverage_features(ONES, 1.0, 4, 0.1, candidates=3), "candidates is 3, below the 4 features"),
        (lambda: leverage_features(ONES, 1.0, 4, 0.1, proposal="uniform"), "'uniform': choose one of data, gaussian"),
        (lambda: leverage_features(ONES, 1.0, 4, 0.0), "lam=0.0"),
        (lambda: leverage_features(ONES, -1.0, 4, 0.1), "scaling=-1.0"),
        (lambda: leverage_features(ONES * NAN, 1.0, 4, 0.1), "x holds nan"),
        (lambda: leverage_features(torch.ones(0, 2), 1.0, 4, 0.1), r"x has shape \[0, 2\]"),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises(DoflaError, match=said):
        call()
