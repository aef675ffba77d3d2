"""What XLA:CPU allocates beyond what is alive at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxauto
from jaxauto.solve.heap import heap_gaps

ROWS, LENGTH, WIDTH, WORDS, LAYERS = 4, 128, 64, 4096, 8


def step(head, layers, x, labels):
    """A scanned network with a language model's head: logits are narrow, their loss is wide."""

    def loss(weights):
        head, layers = weights
        h, _ = jax.lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w), None), x, layers)
        logits = (h @ head).astype(jnp.float32)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))

    return jax.tree.map(lambda w, g: w - g, (head, layers), jax.grad(loss)((head, layers)))


ARGS = (
    jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.bfloat16),
    jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16),
    jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32),
)


def planned(devices, budget, **options):
    return jaxauto.plan(
        step, *ARGS, target=f"cpu:{devices}", mesh={"data": devices}, memory_budget=budget, certify=False, progress=False, **options
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_gaps_are_told(devices):
    """Where something is made again, the logits are read narrow twice, and a sixth of all memory is gaps beside them."""
    with pytest.raises(jaxauto.InfeasibleError) as error:
        planned(devices, 1e3)
    plan = planned(devices, 1.02 * error.value.least_bytes)
    best = plan._bound().solved.best
    assert heap_gaps(best.model, best.x) > 0.1 * plan.estimate.peak_memory
    assert plan.estimate.allocated == plan.estimate.peak_memory + heap_gaps(best.model, best.x)
    assert abs(plan.verify().row("allocated").error) < 0.03 < 1 - plan.estimate.peak_memory / plan.verify().row("allocated").compiled


@pytest.mark.parametrize("donated", [(0, 1), ()])
def test_results_have_their_places_all_the_time(donated):
    plan = planned(1, None, donate_argnums=donated)
    found = plan.verify()
    assert abs(found.row("allocated").error) < 0.03
    assert found.row("peak memory").estimated == found.row("allocated").estimated, "XLA:CPU tells no peak"


def test_of_other_compilers_nothing_is_told():
    plan = jaxauto.plan(step, *ARGS, target="v5e:1x1", certify=False, progress=False)
    assert plan.estimate.allocated is None
