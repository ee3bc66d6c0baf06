"""Plans of the layers and their costs: budgets in bytes of state, the ways to spend them, error curves.

A :class:`~dofla.plans.plan.Plan` is the second of the four nouns. Knows profiles and the registry of feature maps, and
no model.
"""
