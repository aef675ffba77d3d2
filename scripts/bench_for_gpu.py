"""What is written another way for XLA:GPU, with and without: python scripts/bench_for_gpu.py [--targets h100] [--only NAME]

``jaxauto.rewrite.for_gpu``: transposed convolutions, gradients of strided ones whose kernel is gathered, causal dilated ones, zeros that
are scattered into or that a recurrence's backward pass fills its stacks with; ``rewrite/order.py``: sums of rows that alone are kept of a
softmax; gradients whose sums over devices are short. The same step, planned with the same
sharding by hand (bench_accuracy.py), compiled ahead of time: peak memory of one device, seconds by the roofline of the compiled schedule.
Near the least memory the two plans may differ, as each is told what it takes. Writes results/for_gpu.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from bench_swapped import Plan, compare

PLANS: tuple[Plan, ...] = (
    ("flax", "autoencoder", "one device", "off"),
    ("flax", "autoencoder", "one device", "full"),
    ("flax", "WaveNet", "one device", "off"),
    ("flax", "diffusion", "one device", "off"),
    ("flax", "tagger", "one device", "off"),
    ("flax", "tagger", "one device", "full"),
    ("flax", "language model", "data", "full"),
    ("flax", "PPO", "FSDP", "full"),
    ("flax", "PPO", "tensor", "chosen"),
    ("flax", "autoencoder", "tensor", "off"),
    ("flax", "diffusion", "tensor", "full"),
    ("published", "U-Net", "one device", "off"),
    ("published", "U-Net", "tensor", "off"),
    ("published", "LSTM", "one device", "full"),
)


@contextmanager
def as_written() -> Iterator[None]:
    here = "jaxauto.rewrite.for_gpu"
    with (
        mock.patch(f"{here}.instead", return_value=None),
        mock.patch(f"{here}.begin", lambda _, operands, __: (None, operands)),
        mock.patch("jaxauto.cost.liveness.fills_late", return_value=()),
        mock.patch("jaxauto.rewrite.order._Order._sums", return_value=set()),
        mock.patch("jaxauto.cost.fusion.short_sums", return_value=set()),
        mock.patch("jaxauto.solve.decide.short_sums", return_value=set()),
    ):
        yield


if __name__ == "__main__":
    assert __doc__
    if "--targets" not in sys.argv:
        sys.argv += ["--targets", "h100"]
    compare(__doc__, "What is written another way for XLA:GPU", PLANS, as_written, how="another way")
