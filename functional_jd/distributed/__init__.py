"""Several processes, each with its own batch, do what one would do with all of it: with replicas, or with shards."""

from functional_jd.distributed.replicas import agree, mean_jacobian, replicate, replicated
from functional_jd.distributed.sharded import sharded

__all__ = ["agree", "mean_jacobian", "replicate", "replicated", "sharded"]
