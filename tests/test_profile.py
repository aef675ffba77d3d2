"""The symbolic profiler: memory, phases, tables, pictures, per-device numbers. Flops: test_profile_flops.py."""

import functools
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tanh
from jax.sharding import PartitionSpec as P
from zoo import STEPS

import jaxauto
from jaxauto.errors import ArgumentError, ConstraintError
from jaxauto.profile_memory import KINDS
from jaxauto.timeline import short


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def mlp_step(params, batch):
    def loss_fn(p):
        with jax.named_scope("first"):
            h = jnp.tanh(batch[0] @ p["a"])
        with jax.named_scope("second"):
            return jnp.mean((h @ p["b"] - batch[1]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


MLP_ARGS = ({"a": array(64, 256), "b": array(256, 16)}, (array(32, 64), array(32, 16)))
MLP = functools.lru_cache(lambda **options: jaxauto.profile(mlp_step, *MLP_ARGS, **options))


# -------------------------------------------------------------------------------------------------------------- memory


def test_parameters_and_outputs():
    prof = MLP()
    params = 4 * (64 * 256 + 256 * 16)
    assert prof.params_bytes == params
    assert prof.argument_bytes == params + 4 * 32 * (64 + 16)
    assert prof.output_bytes == params + 4


def test_activations_are_what_the_backward_pass_still_reads():
    hidden, error = 4 * 32 * 256, 4 * 32 * 16
    assert hidden <= MLP().activation_bytes <= 2 * hidden + 2 * error


def test_a_forward_pass_has_no_activations_and_names_its_parameters():
    prof = jaxauto.profile(lambda p, x: x @ p["w"] + p["b"], {"w": array(8, 4), "b": array(4)}, array(2, 8))
    assert prof.params_bytes == 4 * (8 * 4 + 4)
    assert prof.activation_bytes == 0
    assert list(prof.phases) == ["forward"]


def test_optimizer_state_is_no_parameter():
    step, args = STEPS["adamw_clip_schedule"]()
    prof = jaxauto.profile(step, *args)
    assert prof.params_bytes == sum(x.nbytes for x in jax.tree.leaves(args[0]["params"]))


def test_memory_by_kind_is_the_memory_at_the_peak():
    prof = MLP()
    assert tuple(prof.memory) == tuple(k for k in KINDS if k in prof.memory)
    assert sum(prof.memory.values()) == pytest.approx(prof.peak_memory)
    assert prof.memory["parameters"] == prof.params_bytes
    assert prof.memory["batch and other inputs"] == 4 * 32 * (64 + 16)
    assert "optimizer state" not in prof.memory  # plain SGD has none
    for kind, bytes_ in prof.memory.items():
        assert sum(x.bytes_ for x in prof.timeline.peak if x.kind == kind) == pytest.approx(bytes_, abs=1)


def test_kinds_along_the_program():
    """Activations pile up until the backward pass, gradients come after it begins."""
    step, args = STEPS["transformer_loop"]()
    prof = jaxauto.profile(step, *args)
    line = prof.timeline
    assert np.allclose(sum(line.by_kind.values()), line.live_bytes)
    kept, gradients = line.by_kind["activations kept"], line.by_kind["gradients and updates"]
    assert abs(int(kept.argmax()) - line.turn) < len(line) / 20
    assert kept[line.turn] == pytest.approx(prof.activation_bytes, rel=0.05)
    assert kept[0] < 0.01 * kept.max() and kept[-1] == 0
    assert gradients[: line.turn].max() < 0.01 * gradients.max()
    assert np.ptp(line.by_kind["parameters"]) == 0


def test_state_that_the_model_does_not_multiply_with_is_optimizer_state():
    step, args = STEPS["adamw_clip_schedule"]()
    prof = jaxauto.profile(step, *args)
    state = sum(x.nbytes for x in jax.tree.leaves(args[0]))
    assert prof.memory["parameters"] == prof.params_bytes
    assert prof.memory["optimizer state"] == state - prof.params_bytes


def test_an_optimizer_that_multiplies_matrices_makes_no_parameters_of_its_moments():
    def step(params, moments, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p) ** 2))(params)
        moments = 0.9 * moments + grads
        return params - 0.1 * moments @ (moments.T @ moments), moments

    prof = jaxauto.profile(step, array(32, 64), array(32, 64), array(8, 32))
    assert prof.params_bytes == prof.memory["parameters"] == prof.memory["optimizer state"] == 4 * 32 * 64


def test_accumulated_gradients_are_gradients():
    step, args = STEPS["gradient_accumulation"]()
    prof = jaxauto.profile(step, *args)
    assert prof.timeline.by_kind["gradients and updates"].max() >= prof.params_bytes


def test_what_a_loop_stacks_is_named_after_what_makes_it():
    def step(w, x):
        def layer(x, k):
            with jax.named_scope("hidden"):
                return tanh(x @ k), None

        return jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2))(w)

    peak = jaxauto.profile(step, array(6, 64, 64), array(512, 64)).timeline.peak
    (stack,) = [x for x in peak if x.name == "hidden/tanh ×6"]
    assert (stack.shape, stack.kind) == ((6, 512, 64), "activations kept")
    assert "(test_what_a_loop_stacks_is_named_after_what_makes_it.<locals>.step.<locals>.layer)" in stack.source


def test_a_forward_pass_has_results():
    prof = jaxauto.profile(lambda p, x: jnp.tanh(x @ p["w"]), {"w": array(8, 4)}, array(2, 8))
    assert prof.memory == {"parameters": 4 * 8 * 4, "batch and other inputs": 4 * 2 * 8, "results": 4 * 2 * 4}


def test_constants_of_a_closure_are_inputs():
    table = jnp.ones((64, 64))
    prof = jaxauto.profile(lambda x: x @ table, array(4, 64))
    assert prof.memory["batch and other inputs"] == 4 * 64 * (64 + 4)


def test_donation_saves_a_copy_of_the_state():
    kept, donated = MLP(donate_argnums=()), MLP()
    assert kept.peak_memory > donated.peak_memory


def test_the_peak_is_what_lives_there():
    timeline = MLP().timeline
    assert sum(x.bytes_ for x in timeline.peak) == pytest.approx(MLP().peak_memory)
    assert timeline.live_bytes[timeline.peak_position] == timeline.live_bytes.max() == MLP().peak_memory
    sizes = [x.bytes_ for x in timeline.peak]
    assert sizes == sorted(sizes, reverse=True)
    largest = timeline.peak[0]
    assert (largest.name, largest.shape, largest.dtype, largest.bytes_) == ("argument 0.a", (64, 256), "float32", 4 * 64 * 256)
    assert len(timeline.names) == len(timeline.sources) == len(timeline)
    assert timeline.phases[timeline.turn] == "backward"
    assert "backward" not in timeline.phases[: timeline.turn]


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_of_the_zoo_has_a_profile(name):
    step, args = STEPS[name]()
    prof = jaxauto.profile(step, *args)
    assert prof.peak_memory >= prof.argument_bytes > 0
    assert prof.flops > 0 and prof.bytes_accessed > 0
    assert prof.flops == pytest.approx(sum(r.flops for r in prof.table()))
    assert prof.bytes_accessed == pytest.approx(sum(r.bytes_ for r in prof.table(depth=1)))
    assert 0 < prof.params_bytes <= prof.argument_bytes
    assert str(prof) and prof._repr_html_()


def test_nothing_is_allocated():
    before = len(jax.live_arrays())
    prof = jaxauto.profile(mlp_step, {"a": array(2**20, 2**20), "b": array(2**20, 16)}, (array(32, 2**20), array(32, 16)))
    assert len(jax.live_arrays()) == before
    assert prof.peak_memory > 4 * 2**40


# -------------------------------------------------------------------------------------------------------------- phases


def test_phases_of_a_step():
    phases = MLP().phases
    assert list(phases) == ["forward", "backward", "optimizer"]
    forward = 2 * 32 * 256 * (64 + 16)
    assert phases["forward"].matmul_flops == forward
    assert phases["backward"].matmul_flops == forward + 2 * 32 * 256 * 16  # no gradient of the input
    assert phases["optimizer"].flops == 2 * (64 * 256 + 256 * 16)
    assert phases["optimizer"].seconds is None


def test_accumulated_gradients_are_looked_into():
    step, args = STEPS["gradient_accumulation"]()
    phases = jaxauto.profile(step, *args).phases
    assert 0 < phases["forward"].matmul_flops < phases["backward"].matmul_flops
    assert phases["optimizer"].flops > 0 and phases["optimizer"].matmul_flops == 0


def test_weight_decay_and_moments_belong_to_the_optimizer():
    step, args = STEPS["adamw_clip_schedule"]()
    prof = jaxauto.profile(step, *args)
    count = sum(x.size for x in jax.tree.leaves(args[0]["params"]))
    assert prof.phases["optimizer"].flops > 10 * count


def test_seconds_on_a_target():
    prof = MLP(target="h100:1")
    chip = jaxauto.Target("h100:1").chip
    assert prof.seconds == pytest.approx(sum(p.seconds for p in prof.phases.values()))
    least = max(prof.flops / chip.peak_flops("float32"), prof.bytes_accessed / chip.hbm_bandwidth)
    assert least < prof.seconds < 10 * least + len(prof.equations) * chip.launch_seconds
    assert prof.target == "h100:1"


def test_what_fits_on_chip_memory_moves_but_takes_no_time():
    """v5e has 128 MiB beside its core; what lives briefly there is not waited for. (Two cores, as v5p has, pass a sort on through HBM.)"""
    small, large = (jaxauto.profile(lambda x: jnp.tanh(jnp.sort(jnp.sin(x))) * 2, array(n), target="v5e:1") for n in (2**10, 2**26))
    assert small.bytes_accessed / 2**10 == large.bytes_accessed / 2**26
    assert small.seconds / 2**10 < 0.7 * large.seconds / 2**26


# -------------------------------------------------------------------------------------------------------------- tables


def test_rows_by_equation_and_by_scope():
    prof = MLP()
    dots = [r for r in prof.table() if r.name.endswith("dot_general")]
    assert [r.name for r in dots][:2] == ["first/dot_general", "second/dot_general"]
    assert (dots[0].flops, dots[0].shape, dots[0].dtype, dots[0].phase) == (2 * 32 * 64 * 256, (32, 256), "float32", "forward")
    assert "test_profile.py" in dots[0].source and "loss_fn" in dots[0].source
    scopes = {(r.name, r.phase) for r in prof.table(depth=1)}
    assert {("first", "forward"), ("second", "forward"), ("first", "backward"), ("second", "backward"), ("(top)", "optimizer")} <= scopes
    assert {r.name for r in prof.table(depth=0)} == {"(top)"}
    assert sum(r.equations for r in prof.table(depth=1)) == len(prof.table())


def test_tables_print():
    prof = MLP()
    text = str(prof.table(depth=1))
    assert "live after" in text and "first" in text and "float32[32,256]" in text
    assert " time " not in text and " time " in str(MLP(target="v5e:1").table(depth=1))
    assert "<td>first</td>" in prof.table(depth=1)._repr_html_()
    assert "profile of mlp_step" in str(prof) and "alive at the peak" in str(prof)
    assert "optimizer" in str(prof) and "activations kept" in str(prof)
    assert "argument 0.a" in prof._repr_html_()
    assert "tests/test_profile.py:" in text and str(Path(__file__).parent.parent) not in text


def test_the_largest_rows():
    table = MLP().table()
    first, second = table.largest(2, "bytes_")
    assert first.bytes_ >= second.bytes_ >= max(r.bytes_ for r in table if r not in (first, second))
    assert {r.phase for r in table.only("backward")} == {"backward"}
    assert sum(len(table.only(phase)) for phase in MLP().phases) == len(table)
    ordered = list(table.largest(5, ordered=True))
    assert ordered == [r for r in table if r in ordered] and len(ordered) == 5
    with pytest.raises(ArgumentError, match=r"largest\(by='seconds'\): these rows have flops, bytes_, live_bytes; seconds need"):
        table.largest(3, "seconds")


def test_a_page_needs_nothing_but_itself(tmp_path):
    path = str(tmp_path / "profile.html")
    assert MLP(target="v5e:1").to_html(path) == path
    text = Path(path).read_text()
    assert text.startswith("<!doctype html>") and "By scope" in text and "second" in text
    assert not re.search(r"(src|href)=|https?://|<script|@import|url\(", text)
    for part in ("forward", "backward", "optimizer", "activations kept", "test_profile.py"):
        assert part in text


def test_a_table_of_negative_depth_is_refused():
    with pytest.raises(ArgumentError, match=r"table\(depth=-1\): give the number of scope components"):
        MLP().table(depth=-1)


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (999, "999 B"), (999.6, "1 KB"), (1234567, "1.23 MB"), (2.5e21, "2.5e+03 EB")])
def test_short_numbers(number, text):
    assert short(number, "B") == text


# ---------------------------------------------------------------------------------------------------------- on a mesh


def test_one_device_of_a_mesh():
    whole = MLP()
    prof = jaxauto.profile(mlp_step, *MLP_ARGS, mesh={"data": 8}, in_specs={"0.*": P(), "1.*": P("data")})
    assert prof.mesh == {"data": 8}
    assert prof.specs["0.a"] == P() and prof.specs["1.0"] == P("data")
    assert prof.params_bytes == whole.params_bytes
    assert prof.argument_bytes == whole.params_bytes + (whole.argument_bytes - whole.params_bytes) / 8
    assert prof.matmul_flops == whole.matmul_flops / 8
    assert whole.activation_bytes / 8 <= prof.activation_bytes < whole.activation_bytes / 4
    assert whole.peak_memory / 8 < prof.peak_memory < whole.peak_memory


def test_a_mesh_of_devices_is_a_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    prof = jaxauto.profile(mlp_step, *MLP_ARGS, mesh=mesh, in_specs={"0.a": P(None, "model"), "0.b": P("model"), "1.*": P("data")})
    assert prof.matmul_flops == MLP().matmul_flops / 8
    assert prof.params_bytes == MLP().params_bytes / 2


def test_in_specs_that_do_not_fit():
    with pytest.raises(ArgumentError, match="give mesh= too"):
        jaxauto.profile(mlp_step, *MLP_ARGS, in_specs={"1.*": P("data")})
    with pytest.raises(ConstraintError, match="matches no argument"):
        jaxauto.profile(mlp_step, *MLP_ARGS, mesh={"data": 8}, in_specs={"7.*": P("data")})
    with pytest.raises(ArgumentError, match=r"mesh=\{\}: give a jax.sharding.Mesh or axis sizes"):
        jaxauto.profile(mlp_step, *MLP_ARGS, mesh={})


# ------------------------------------------------------------------------------------------------------------- speed


@pytest.fixture
def models(monkeypatch):
    """scripts/models.py."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "scripts")
    return importlib.import_module("models")


def test_a_scanned_model_of_405_billion_parameters_has_the_published_size(models):
    step, args = models.step_and_args(models.LLAMA["405b"])
    prof = jaxauto.profile(step, *args)
    count = sum(x.size for x in jax.tree.leaves(args[0]))
    assert prof.params_bytes == 4 * count > 4 * 4.05e11
    tokens, width, layers = 8 * 1024, 16384, 126
    products = 6 * tokens * (count - 128256 * width)  # the embedding is looked up, not multiplied
    scores = 3 * 2 * 2 * tokens * 1024 * width * layers
    assert prof.matmul_flops == pytest.approx(products + scores, rel=1e-3)


def test_scanned_and_unrolled_layers_cost_the_same(models):
    small = models.LLAMA["8b"].with_(layers=6)
    unrolled = jaxauto.profile(*(lambda s, a: (s, *a))(*models.step_and_args(small.with_(scan=False))))
    scanned = jaxauto.profile(*(lambda s, a: (s, *a))(*models.step_and_args(small)))
    assert unrolled.matmul_flops == scanned.matmul_flops
    assert unrolled.peak_memory < scanned.peak_memory  # gradients are used up as they come


@pytest.mark.parametrize("target", ["v5e:1", "h100:1", "cpu:1"])
@pytest.mark.parametrize("name", ["transformer_loop", "linen_residual_net"])
def test_one_device_is_what_the_planner_believes_of_it(name, target):
    """Same memory by kind, tile padding included, same flops; of time the planner also counts the way of the batch to the chip."""
    step, args = STEPS[name]()
    prof = jaxauto.profile(step, *args, target=target)
    believed = jaxauto.plan(step, *args, target=target, mesh={"data": 1}, remat="off", certify=False).estimate
    assert prof.peak_memory == pytest.approx(believed.peak_memory)
    assert prof.matmul_flops == believed.flops
    assert prof.seconds == pytest.approx(believed.compute_time, rel=1e-6)
    for kind in ("parameters", "optimizer state", "activations kept", "gradients and updates"):
        assert prof.memory.get(kind, 0.0) == pytest.approx(believed.memory[kind], rel=0.01, abs=0.002 * prof.peak_memory)


def test_arrays_fill_tiles_on_a_tpu():
    narrow = array(4096, 3)  # 128 lanes for 3
    prof = jaxauto.profile(lambda x: x + 1, narrow, target="v5e:1")
    assert prof.argument_bytes == 4 * 4096 * 3
    assert 4 * 4096 * 3 < prof.memory["batch and other inputs"] <= 4 * 4096 * 8


def test_a_path_that_reads_like_a_glob_is_that_argument():
    """Keys may hold brackets, as those that jax.tree_util.keystr makes."""
    step = lambda p, x: jnp.sum(x @ p["['w']"])  # noqa: E731
    args = {"['w']": jax.ShapeDtypeStruct((16, 8), jnp.float32)}, jax.ShapeDtypeStruct((4, 16), jnp.float32)
    found = jaxauto.profile(step, *args, target="v5e:2x4", mesh={"model": 8}, in_specs={"0.['w']": P(None, "model")})
    assert found.params_bytes == 16 * 8 * 4 / 8
