"""The symbolic profiler: flops against closed forms and against XLA, memory, phases, tables, per-device numbers."""

import builtins
import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from zoo import STEPS

import jaxauto
from jaxauto.errors import ArgumentError, ConstraintError
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


# --------------------------------------------------------------------------------------------------------------- flops


def test_matmul_flops_and_bytes():
    prof = jaxauto.profile(jnp.matmul, array(30, 70), array(70, 50))
    assert prof.flops == prof.matmul_flops == 2 * 30 * 70 * 50
    assert prof.bytes_accessed == 4 * (30 * 70 + 70 * 50 + 30 * 50)
    assert prof.argument_bytes == 4 * (30 * 70 + 70 * 50)
    assert prof.output_bytes == 4 * 30 * 50
    assert prof.peak_memory == prof.argument_bytes + prof.output_bytes


@pytest.mark.parametrize(("stride", "out"), [(1, 14), (2, 7)])
def test_convolution_flops(stride, out):
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(stride, stride), padding="VALID")
    prof = jaxauto.profile(conv, array(4, 3, 16, 16), array(8, 3, 3, 3))
    assert prof.matmul_flops == 2 * 4 * 8 * out * out * 3 * 3 * 3


def test_attention_flops():
    batch, length, heads, width = 2, 64, 4, 16

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k), axis=-1)
        return jnp.einsum("bhlm,bmhd->blhd", weights, v)

    prof = jaxauto.profile(attention, *[array(batch, length, heads, width)] * 3)
    scores = batch * heads * length * length
    assert prof.matmul_flops == 2 * 2 * scores * width
    assert 4 * scores <= prof.flops - prof.matmul_flops <= 6 * scores  # max, subtract, exp, sum, divide, and rows


def test_elementwise_equations_count_one_for_each_element_and_reductions_what_they_read():
    assert jaxauto.profile(lambda x: x * 2 + 1, array(100)).flops == 200
    assert jaxauto.profile(lambda x: x.sum(), array(10, 10)).flops == 100
    assert jaxauto.profile(lambda x: x.reshape(100).astype(jnp.bfloat16), array(10, 10)).flops == 0


def test_loops_count_every_trip():
    def layers(x, w):
        return jax.lax.scan(lambda c, k: (c @ k, None), x, w)[0]

    prof = jaxauto.profile(layers, array(8, 32), array(12, 32, 32))
    assert prof.flops == 12 * 2 * 8 * 32 * 32
    assert [r.times for r in prof.table() if "dot_general" in r.name] == [12]


@pytest.mark.parametrize("name", ["mlp_sgd", "transformer_loop", "linen_vision_transformer", "linen_residual_net", "linen_unet"])
def test_flops_are_those_of_xla(name):
    step, args = STEPS[name]()
    cost = jax.jit(step).lower(*args).cost_analysis()
    assert jaxauto.profile(step, *args).flops == pytest.approx(cost["flops"] + cost.get("transcendentals", 0), rel=0.02)


def test_flops_are_those_of_a_compiled_program():
    cost = jax.jit(mlp_step).lower(*MLP_ARGS).compile().cost_analysis()
    assert MLP().flops == pytest.approx(cost["flops"] + cost["transcendentals"], rel=0.02)


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
    prof = MLP(target="v5p:1x1x1")
    chip = jaxauto.Target("v5p:1x1x1").chip
    assert prof.seconds == pytest.approx(sum(p.seconds for p in prof.phases.values()))
    least = max(prof.flops / chip.peak_flops("float32"), prof.bytes_accessed / chip.hbm_bandwidth)
    assert least < prof.seconds < 10 * least
    assert prof.target == "v5p:1x1x1"


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
    assert "<td>first</td>" in prof.table(depth=1)._repr_html_()
    assert "profile of mlp_step" in str(prof) and "alive at the peak" in str(prof)
    assert "argument 0.a" in prof._repr_html_()


def test_a_table_of_negative_depth_is_refused():
    with pytest.raises(ArgumentError, match=r"table\(depth=-1\): give the number of scope components"):
        MLP().table(depth=-1)


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (999, "999 B"), (999.6, "1 KB"), (1234567, "1.23 MB"), (2.5e21, "2.5e+03 EB")])
def test_short_numbers(number, text):
    assert short(number, "B") == text


def test_a_plot(tmp_path):
    figure = MLP().timeline.plot(tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 1000
    assert figure.axes[0].get_ylabel() == "live GB"


def test_without_matplotlib_plot_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ImportError, match=r"pip install 'jaxauto\[viz\]'"):
        MLP().timeline.plot()


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


def decoders():
    path = Path(__file__).parent.parent / "scripts" / "models.py"
    spec = importlib.util.spec_from_file_location("models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_scanned_model_of_405_billion_parameters_has_the_published_size():
    models = decoders()
    step, args = models.step_and_args(models.LLAMA["405b"])
    prof = jaxauto.profile(step, *args)
    count = sum(x.size for x in jax.tree.leaves(args[0]))
    assert prof.params_bytes == 4 * count > 4 * 4.05e11
    tokens, width, layers = 8 * 1024, 16384, 126
    products = 6 * tokens * (count - 128256 * width)  # the embedding is looked up, not multiplied
    scores = 3 * 2 * 2 * tokens * 1024 * width * layers
    assert prof.matmul_flops == pytest.approx(products + scores, rel=1e-3)


def test_scanned_and_unrolled_layers_cost_the_same():
    models = decoders()
    small = models.LLAMA["8b"].with_(layers=6)
    unrolled = jaxauto.profile(*(lambda s, a: (s, *a))(*models.step_and_args(small.with_(scan=False))))
    scanned = jaxauto.profile(*(lambda s, a: (s, *a))(*models.step_and_args(small)))
    assert unrolled.matmul_flops == scanned.matmul_flops
    assert unrolled.peak_memory < scanned.peak_memory  # gradients are used up as they come
