"""What primitives do to dimensions: one file for each family, one registry."""

from jaxauto.rules import (  # noqa: F401  importing a family registers its rules
    contraction,
    convolution,
    cutting,
    elementwise,
    indexing,
    linalg,
    passing,
    random,
    reduction,
    shape,
    window,
)
from jaxauto.rules.registry import (
    NO_RULE,
    factor_sizes,
    has_rule,
    register_rule,
    rule_for,
    signature,
    unknown_primitive_message,
)

__all__ = ["NO_RULE", "factor_sizes", "has_rule", "register_rule", "rule_for", "signature", "unknown_primitive_message"]
