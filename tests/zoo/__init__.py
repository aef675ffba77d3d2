"""Small, deterministic train steps of many kinds. Every factory takes nothing and returns ``(step, args)``.

``step(*args)`` returns ``(*state, metrics)``: all results but the last replace the leading arguments at the next call;
``metrics`` is a dict with a scalar ``"loss"``. A step of MUTATING_STEPS changes the flax nnx objects among its arguments
in place instead, as under ``nnx.jit``, and returns metrics only.
"""

from zoo import attention, graphs, linen_models, nnx_models, optimizers, plain

STEPS = plain.STEPS | attention.STEPS | graphs.STEPS | optimizers.STEPS | linen_models.STEPS | nnx_models.STEPS
MUTATING_STEPS = nnx_models.MUTATING_STEPS
