"""The tolerance λ of degrees of freedom. Knows nothing else, so that help pages can show it at once."""

import math

from dofla.errors import DoflaError

DEFAULT_LAMBDA = 2.0**-8
"""With unit trace no head can show more than 1/λ degrees of freedom. 2⁻⁸ leaves room for 256, the range of the paper's
Table 2; at 2⁻⁴, the paper's choice for GPT-2 on its own unstated scale, every head would be squeezed below 16."""


def check_lambda(lam: float) -> None:
    """Raise DoflaError unless λ is a positive finite number."""
    if not (lam > 0 and math.isfinite(lam)):
        raise DoflaError(f"lambda is {lam}: it must be a positive number, for instance {DEFAULT_LAMBDA}")
