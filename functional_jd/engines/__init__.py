"""From losses to an observation: Jacobian, Gramian, weighted pass, the choice between them, and kinds of losses."""

from functional_jd.aggregation.observation import Observation
from functional_jd.core.types import Declared
from functional_jd.engines.by_name import features_engine, gramian_engine, jacobian_engine, weighted_engine
from functional_jd.engines.choose import EngineChoice
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.plan import Engine, Plan, require

__all__ = [
    "PLAIN",
    "Declared",
    "Engine",
    "EngineChoice",
    "Kind",
    "Observation",
    "Plan",
    "features_engine",
    "gramian_engine",
    "jacobian_engine",
    "require",
    "weighted_engine",
]
