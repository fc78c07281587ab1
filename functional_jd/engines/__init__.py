"""From losses to an observation: Jacobian, Gramian, weighted pass, and the choice between them."""

from functional_jd.engines.choose import EngineChoice
from functional_jd.engines.features import features_engine
from functional_jd.engines.inner_products import gramian_engine
from functional_jd.engines.jacobian import jacobian_engine
from functional_jd.engines.plan import Engine, Plan
from functional_jd.engines.weighted import weighted_engine

__all__ = [
    "Engine",
    "EngineChoice",
    "Plan",
    "features_engine",
    "gramian_engine",
    "jacobian_engine",
    "weighted_engine",
]
