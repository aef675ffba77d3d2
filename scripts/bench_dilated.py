"""Weight gradients of transposed convolutions, as written and exchanged: python scripts/bench_dilated.py [--targets v5e,h100] [--only NAME]

``jaxauto.dilated`` exchanges their operands. The same step, a U-Net with four transposed convolutions, planned with the same sharding by
hand (bench_accuracy.py), with and without, compiled ahead of time: peak memory of one device, seconds by the roofline of the compiled
schedule, the compiler's own cycles. Writes results/dilated.md.
"""

from __future__ import annotations

from unittest import mock

from bench_swapped import compare

PLANS = (
    ("published", "U-Net", "one device", "off"),
    ("published", "U-Net", "one device", "full"),
    ("published", "U-Net", "data", "full"),
    ("published", "U-Net", "FSDP", "chosen"),
    ("published", "U-Net", "tensor", "off"),
    ("published", "U-Net", "solver", "full"),
)

if __name__ == "__main__":
    assert __doc__
    compare(__doc__, "Weight gradients of transposed convolutions", PLANS, lambda: mock.patch("jaxauto.graph.undilated", return_value=None))
