"""The engines of a step, by name."""

from functional_jd.engines.gramian_engine import gramian_engine
from functional_jd.engines.jacobian import jacobian_engine
from functional_jd.engines.plan import Engine
from functional_jd.engines.weighted import weighted_engine

ENGINES: dict[str, Engine] = {
    "jacobian": jacobian_engine(),
    "gramian": gramian_engine(),
    "weighted": weighted_engine(),
}
"""`"auto"` is one of these, as `choose_engine` says."""
