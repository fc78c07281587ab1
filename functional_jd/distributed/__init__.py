"""Replicas: the engine of several processes, each with its own batch, as one process would do with all of it."""

from functional_jd.distributed.replicas import agree, mean_jacobian, replicate, replicated

__all__ = ["agree", "mean_jacobian", "replicate", "replicated"]
