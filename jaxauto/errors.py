"""One class for each failure. A message says what, with numbers, and what to change."""


class JaxAutoError(Exception):
    """Base of everything jaxauto raises on purpose."""


class InfeasibleError(JaxAutoError):
    """No plan fits: the message says the least memory that any plan needs and what it is made of.

    ``least_bytes``: that least memory, as far as the planner looked: a plan for this budget exists. Where plans are certified, what the
    compiler was seen to need; else the planner's estimate. None where the planner does not know.
    """

    def __init__(self, message: str, least_bytes: float | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes


class ConstraintError(JaxAutoError):
    """A constraint names no argument or an unknown mesh axis, or does not divide a dimension."""


class TargetError(JaxAutoError):
    """Unknown chip or topology, or no ahead-of-time compiler installed for it."""


class PlanMismatchError(JaxAutoError):
    """A saved plan, or a call, whose arguments are not those the plan was made for."""


class TraceError(JaxAutoError):
    """The step cannot be traced; the message carries JAX's own error and the argument that was abstract."""


class ArgumentError(JaxAutoError):
    """An option or an argument of a call is unusable (deleted array, bad budget, more mesh than devices)."""


class InternalError(JaxAutoError):
    """jaxauto contradicts itself: a bug, never the user's fault. The message holds what a report of it should."""


class UnknownPrimitiveWarning(UserWarning):
    """A primitive has no sharding rule: its operands are replicated there."""
