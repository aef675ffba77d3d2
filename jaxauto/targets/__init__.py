"""Chips as data, topologies, and ahead-of-time devices."""

from jaxauto.targets.chip import Chip, Number
from jaxauto.targets.chips import CHIPS
from jaxauto.targets.compilers import compiler_for
from jaxauto.targets.table import TargetTable, targets
from jaxauto.targets.target import Target, detect, resolve

__all__ = ["CHIPS", "Chip", "Number", "Target", "TargetTable", "compiler_for", "detect", "resolve", "targets"]
