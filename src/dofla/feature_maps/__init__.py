"""Feature maps, one small file each, and the layer that holds those of its heads.

To add one: write the file, add a line to ``FEATURE_MAPS``. Knows the arithmetic of attention, and no model.
"""

from dofla.errors import check_choice
from dofla.feature_maps.base import FeatureMap
from dofla.feature_maps.dijiang import DiJiang, DiJiangCode
from dofla.feature_maps.elu import Elu1
from dofla.feature_maps.exponential import Exponential
from dofla.feature_maps.hedgehog import Hedgehog
from dofla.feature_maps.mlp import MLP
from dofla.feature_maps.none import NoFeatures
from dofla.feature_maps.performer import Performer
from dofla.feature_maps.prf import PRF
from dofla.feature_maps.t2r import T2R

FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "dijiang": DiJiang,
    "dijiang_code": DiJiangCode,
    "elu1": Elu1,
    "exponential": Exponential,
    "hedgehog": Hedgehog,
    "mlp": MLP,
    "none": NoFeatures,
    "performer": Performer,
    "prf": PRF,
    "t2r": T2R,
}


def feature_map_class(name: str) -> type[FeatureMap]:
    """The class registered as ``name``; DoflaError listing the known ones if there is none."""
    check_choice("feature map", name, FEATURE_MAPS)
    return FEATURE_MAPS[name]


__all__ = ["FEATURE_MAPS", "PRF", "FeatureMap", "feature_map_class"]
