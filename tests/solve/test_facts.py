"""What the tables ask of a program: how often a buffer is made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers import SCANNED, everything_again, scanned_blocks
from jax.sharding import PartitionSpec

import jaxauto
from jaxauto.solve.facts import buffer_runs


@pytest.mark.parametrize("target", ["v5e:2x4", "h100:8"])
def test_a_stack_is_made_once_for_all_trips(target):
    remat, _ = scanned_blocks(target)
    variant = everything_again(remat)
    runs = buffer_runs(variant, remat.groups)
    for k, number in enumerate(variant.buffers.ids):
        value = variant.rewritten.graph.values[int(number)]
        if value.shape[:1] == (SCANNED,):
            assert runs[k] == 1
    assert runs.max() == SCANNED, "what is made in the body is made in each trip"


@pytest.mark.parametrize(("shifted", "compiled"), [(False, 597.2), (True, 1085.2)])
def test_transposed_cotangents_take_the_place_of_logits_unless_they_are_padded(shifted, compiled):
    """MiB that libtpu 0.0.42 takes: logits of 500 and their cotangent twice, of shifted labels a transposed one before it is padded too."""
    tokens, width, vocabulary = (64, 1024), 768, 32000

    def loss(params, x, labels):
        logits = jnp.tanh(x @ params["into"]) @ params["head"]
        logits, labels = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
        told = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(told, labels[..., None], -1))

    def step(params, x, labels):
        rounded = lambda params: jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(lambda p: loss(rounded(p), x, labels))(params))

    params = {name: jax.ShapeDtypeStruct((width, n), jnp.float32) for name, n in (("into", width), ("head", vocabulary))}
    args = params, jax.ShapeDtypeStruct((*tokens, width), jnp.bfloat16), jax.ShapeDtypeStruct(tokens, jnp.int32)
    pins = {"0.*": PartitionSpec(None, "data"), "1": PartitionSpec("data"), "2": PartitionSpec("data")}
    plan = jaxauto.plan(step, *args, target="v5e:2x4", mesh={"data": 8}, constraints=pins, remat="off", certify=False, progress=False)
    assert plan.estimate.peak_memory / 2**20 == pytest.approx(compiled, rel=0.06)
