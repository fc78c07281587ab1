"""From losses to an observation: Jacobian, Gramian, weighted pass, the choice between them, and what makes another kind
of losses or another engine.
"""

from functional_jd.aggregation.observation import Observation
from functional_jd.core.types import Declared
from functional_jd.engines.choose import EngineChoice
from functional_jd.engines.features import features_engine
from functional_jd.engines.gramian_engine import gramian_engine
from functional_jd.engines.jacobian import jacobian_engine
from functional_jd.engines.kinds.kind import Kind
from functional_jd.engines.kinds.plain import PLAIN
from functional_jd.engines.kinds.results import Pullback
from functional_jd.engines.plan import Engine, Plan, require
from functional_jd.engines.weighted import weighted_engine

__all__ = [
    "PLAIN",
    "Declared",
    "Engine",
    "EngineChoice",
    "Kind",
    "Observation",
    "Plan",
    "Pullback",
    "features_engine",
    "gramian_engine",
    "jacobian_engine",
    "require",
    "weighted_engine",
]
