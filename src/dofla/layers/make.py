"""Making a layer of its plan."""

from typing import Any

from dofla.attention import CompressedHeads, HeadGroup, KeySmoothing
from dofla.feature_maps.heads import FeatureHeads
from dofla.layers.layer import AttentionLayer
from dofla.layers.predictor import ImportancePredictor
from dofla.plans.layers import CompressedLayer, FeatureLayer, LayerPlan


def layer_of(plan: LayerPlan) -> AttentionLayer:
    """The attention of a module that does not stay softmax."""
    return AttentionLayer(*parts_of(plan))


def parts_of(plan: LayerPlan) -> tuple[list[HeadGroup[Any]], KeySmoothing | None, ImportancePredictor | None]:
    """The arguments of :class:`AttentionLayer`: groups of KV heads, what smooths the keys, and what predicts
    importance. Heads of one size are a group, so that no head is padded to the size of another."""
    if isinstance(plan, CompressedLayer):
        heads = CompressedHeads(plan.sizes, plan.head_dim, plan.value_dim, plan.bits)
        predictor = ImportancePredictor(plan.kv_heads, plan.input_width) if plan.input_width else None
        return [heads], KeySmoothing(plan.kv_heads, plan.head_dim), predictor
    assert isinstance(plan, FeatureLayer)
    groups: list[HeadGroup[Any]] = []
    for size in dict.fromkeys(plan.sizes):
        own, (features, window, sinks) = [n for n, other in enumerate(plan.sizes) if other == size], size
        shape = plan.head_dim, plan.value_dim, window, sinks, plan.token_dtype
        groups.append(FeatureHeads(own, plan.feature_map, features, *shape))
    return groups, KeySmoothing(plan.kv_heads, plan.head_dim) if plan.smooth_keys else None, None
