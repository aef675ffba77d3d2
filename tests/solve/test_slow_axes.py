"""Where links are slow, plans send little, and of the kind that can wait; the same mesh over fast links, and rings against lines."""

from __future__ import annotations

import functools

import pytest
from discovery.models import mlp_tower

import jaxauto
from jaxauto.targets.target import Target

MESH = {"across": 2, "inside": 8}
SLICES, NODES, FAST = "v5p:2*2x2x2", "h100:2x8", "v5p:2x2x4"  # data-centre network, a network card for each GPU, one torus
MANY_ROWS, ROWS, FEWER_ROWS, FEW_ROWS = 65536, 8192, 4096, 1024


@functools.cache
def plan(target: str, rows: int) -> jaxauto.Plan:
    step, args = mlp_tower(4096, 16384, 3, rows)
    return jaxauto.plan(step, *args, target=target, mesh=MESH, certify=False, progress=False)


def sent(kind: str, bytes_: float, across: int, inside: int) -> tuple[float, float]:
    """Bytes that each device of a group sends across and inside, level by level."""
    devices = across * inside
    if kind == "all-to-all":
        return bytes_ * (across - 1) / (across * devices), bytes_ * (inside - 1) / (inside * devices)
    if kind == "collective-permute":
        return (bytes_ / devices, 0.0) if across > 1 else (0.0, bytes_ / devices)
    twice = 2 if kind == "all-reduce" else 1
    return twice * bytes_ * (across - 1) / devices, twice * bytes_ * (inside - 1) / inside


def traffic(target: str, rows: int) -> tuple[float, float, float]:
    """Bytes a device sends in a step: across, of those what computation waits for (no weights, no gradients), and inside."""
    best = plan(target, rows).program.solved.found.best
    across = waited = inside = 0.0
    for kind, bytes_, axes, times, _, resource, _ in best.model.collectives(best.x):
        over, under = sent(kind, bytes_, *(n if a in axes else 1 for a, n in enumerate(best.model.mesh.sizes)))
        across, inside = across + times * over, inside + times * under
        waited += times * over * (resource == "blocking")
    return across, waited, inside


@pytest.mark.parametrize("target", [SLICES, NODES])
@pytest.mark.parametrize("rows", [MANY_ROWS, ROWS])
def test_a_slow_axis_carries_weights_and_gradients_and_no_activations(target, rows):
    across, waited, inside = traffic(target, rows)
    assert waited < 1e-4 * inside  # the loss
    assert across < 0.25 * inside


def test_the_same_mesh_over_fast_links_carries_activations():
    for rows in (FEWER_ROWS, FEW_ROWS):
        across, waited, inside = traffic(FAST, rows)
        assert waited > 0.05 * inside
        assert traffic(SLICES, rows)[0] < across
    assert traffic(SLICES, ROWS)[0] < 1e-3 * traffic(FAST, ROWS)[0]  # so few rows as FEW_ROWS are little to send, even there


def test_the_slower_the_links_across_the_less_goes_over_them():
    """Where gradients are little beside activations, and where they are much."""
    for rows in (MANY_ROWS, ROWS, FEW_ROWS):
        slices, nodes = traffic(SLICES, rows)[0], traffic(NODES, rows)[0]
        assert slices <= nodes
    assert traffic(SLICES, MANY_ROWS)[0] > 0  # with enough work to hide it behind


def test_rings_are_faster_than_lines(monkeypatch):
    step, args = mlp_tower(4096, 16384, 3, FEW_ROWS)

    def estimate():
        found = jaxauto.plan(step, *args, target="v5p:4x4x4", mesh={"a": 16, "b": 4}, certify=False, progress=False)
        return found.estimate

    ring = estimate()
    monkeypatch.setattr(Target, "wraps", (False, False, False))
    line = estimate()
    assert line.step_time > 1.1 * ring.step_time
    assert line.exposed_comm_time > ring.exposed_comm_time
