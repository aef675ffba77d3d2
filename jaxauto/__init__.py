"""jaxauto: a JAX train step written for one device, on a mesh of GPUs or TPUs.

Importing does nothing: no backend is started, no environment changed, nothing patched.
"""

from jaxauto.api import auto_shard, plan
from jaxauto.core import OpRule
from jaxauto.errors import (
    ArgumentError,
    ConstraintError,
    InfeasibleError,
    InternalError,
    JaxAutoError,
    PlanMismatchError,
    TargetError,
    TraceError,
    UnknownPrimitiveWarning,
)
from jaxauto.plan import Plan
from jaxauto.profile import profile
from jaxauto.rules import register_rule
from jaxauto.targets import Target, targets

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ConstraintError",
    "InfeasibleError",
    "InternalError",
    "JaxAutoError",
    "OpRule",
    "Plan",
    "PlanMismatchError",
    "Target",
    "TargetError",
    "TraceError",
    "UnknownPrimitiveWarning",
    "auto_shard",
    "plan",
    "profile",
    "register_rule",
    "targets",
]
