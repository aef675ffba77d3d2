"""What random bits take."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto import hlo
from jaxauto.cost.fusion import find_buffers
from jaxauto.cost.hashing import XORS, unhidden
from jaxauto.cost.schedule import schedule_seconds
from jaxauto.graph import build, walk
from jaxauto.rules import rule_for
from jaxauto.targets.chips import CHIPS

N = 2**20
X = jax.ShapeDtypeStruct((N,), jnp.float32)
SEED = jax.ShapeDtypeStruct((), jnp.int32)
TPU = CHIPS["v5e"]


def graph_of(fun, *args):
    return build(jax.make_jaxpr(fun)(*args))


def found(graph, chip=TPU):
    rules = {node.id: rule_for(node.eqn) for node in walk(graph) if not node.bodies}
    return list(unhidden(graph, find_buffers(graph, rules, platform=chip.platform), chip).values())


def drop(x, seed, impl="threefry2x32"):
    return jnp.where(jax.random.bernoulli(jax.random.key(seed, impl=impl), 0.9, x.shape), x, 0)


def test_hashes_hide_behind_the_bytes_of_their_kernel():
    moved = 2 * X.size * 4 / (TPU.bandwidth_efficiency * TPU.hbm_bandwidth)
    (more,) = found(graph_of(drop, X, SEED))
    assert more == pytest.approx(N * TPU.hash_seconds - moved, rel=1e-3)
    numbers = {**TPU.numbers, "hash_seconds": dataclasses.replace(TPU.numbers["hash_seconds"], value=0.9 * moved / N)}
    assert not found(graph_of(drop, X, SEED), dataclasses.replace(TPU, numbers=numbers))
    assert not found(graph_of(drop, X, SEED), CHIPS["cpu"])


@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "h200:1"])
def test_a_plan_and_a_profile_are_told_the_longer_of_the_two(target):
    chip = jaxauto.Target(target).chip
    plan = jaxauto.plan(drop, X, SEED, target=target, remat="off", donate_argnums=(), certify=False, progress=False)
    assert plan.estimate.compute_time == pytest.approx(N * chip.hash_seconds + chip.launch_seconds, rel=0.02)
    assert jaxauto.profile(drop, X, SEED, target=target).seconds == pytest.approx(plan.estimate.compute_time, rel=0.02)
    assert "random bits" in plan.explain()


def test_devices_share_the_hashes():
    make = lambda n: jaxauto.plan(  # noqa: E731
        drop, X, SEED, target="v5e:2x4", mesh={"data": n}, remat="off", donate_argnums=(), certify=False, progress=False
    )
    one, eight = (make(n).estimate.compute_time for n in (1, 8))
    assert eight == pytest.approx(one / 8, rel=0.01)


def test_the_clock_counts_exclusive_ors():
    rounds = "".join(f"  %x.{k} = u32[1024]{{0}} xor(%p, %p)\n" for k in range(XORS - 1))
    text = (
        "HloModule m\n\n%hash (p: u32[1024]) -> u32[1024] {\n  %p = u32[1024]{0} parameter(0)\n"
        f"{rounds}  ROOT %y = u32[1024]{{0}} xor(%p, %p)\n}}\n\n"
        "ENTRY %main (a: u32[1024]) -> u32[1024] {\n  %a = u32[1024]{0} parameter(0)\n"
        "  ROOT %f = u32[1024]{0} fusion(%a), kind=kLoop, calls=%hash\n}\n"
    )
    spent = schedule_seconds(hlo.parse(text), TPU, lambda _: 0.0)
    assert spent.total_seconds == pytest.approx(1024 * TPU.hash_seconds)
