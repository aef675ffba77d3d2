"""Compiling for targets that are not here, with the real compilers where they are installed, on the CPU everywhere."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxauto import aot
from jaxauto.errors import JaxAutoError, TargetError
from jaxauto.targets import Target, compilers, detect

AXES = ("data", "model")
WIDTH, HIDDEN, BATCH = 256, 512, 64
PARAMETERS = [P("data", "model"), P("model", "data")]
IN = [*PARAMETERS, *PARAMETERS, P("data"), P("data")]
OUT = [*PARAMETERS, *PARAMETERS, P()]
GIB = 2**30


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = [f32(WIDTH, HIDDEN), f32(HIDDEN, WIDTH), f32(WIDTH, HIDDEN), f32(HIDDEN, WIDTH), f32(BATCH, WIDTH), f32(BATCH, WIDTH)]


def make_mlp_step(mesh):
    """Two layers with momentum; parameters sharded over both axes as under FSDP, activations pinned inside."""

    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(w1, w2, m1, m2, x, y):
        def loss(weights):
            hidden = pin(jax.nn.relu(x @ weights[0]), "data", "model")
            return jnp.mean((pin(hidden @ weights[1], "data", None) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)((w1, w2))
        momenta = [0.9 * m + g for m, g in zip((m1, m2), gradients)]
        return [w1 - 0.1 * momenta[0], w2 - 0.1 * momenta[1], *momenta, value]

    return step


def compile_mlp(target, shape, **more):
    return aot.compile_step(make_mlp_step, ARGS, IN, OUT, (0, 1, 2, 3), Target(target), shape, AXES, **more)


def needs(target):
    missing = aot.compiler_for(Target(target)) is None
    return pytest.param(target, marks=pytest.mark.skipif(missing, reason=f"no ahead-of-time compiler for {target} is installed"))


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    aot.close_workers()


@pytest.mark.parametrize("target", [needs("v5e:2x4"), needs("h100:8"), needs("cpu:8")])
def test_a_step_compiles_with_its_shardings_and_donation(target):
    compiled = compile_mlp(target, (4, 2))
    state = 4 * WIDTH * HIDDEN * 4 / 8
    data = 2 * BATCH * WIDTH * 4 / 4
    assert compiled.memory["argument"] == state + data
    assert compiled.memory["alias"] == state  # donated, and given back in the same sharding
    assert state < compiled.memory["output"] < state + 4096
    assert compiled.device_bytes >= state + data
    assert "num_partitions=8" in compiled.text and "is_scheduled=true" in compiled.text
    assert any(name in compiled.text for name in ("all-gather", "all-reduce", "reduce-scatter"))
    assert compiled.compiler == aot.compiler_for(Target(target))
    assert compiled.seconds > 0


@pytest.mark.parametrize("target", [needs("v5e:2x4"), needs("h100:8"), needs("cpu:8")])
def test_constraints_inside_the_step_are_kept(target):
    def maker(spec):
        def make(mesh):
            return lambda x: [jnp.tanh(jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, spec)))]

        return make

    def gathers(spec):
        text = aot.compile_step(maker(spec), [f32(1024, 1024)], [P("data")], [P("data")], (), Target(target), (4, 2), AXES).text
        return any(name in text for name in ("all-gather", "all-to-all"))

    assert gathers(P(None, "data"))
    assert not gathers(P("data"))


@pytest.mark.parametrize("target", [needs("v5e:2x4")])
def test_memory_kinds_are_kept(target):
    mesh = aot.abstract_mesh((4, 2), AXES)

    def make(mesh):
        def step(x, w):
            saved = jax.device_put(jnp.sin(x @ w), NamedSharding(mesh, P("data"), memory_kind="pinned_host"))
            back = jax.device_put(saved, NamedSharding(mesh, P("data"), memory_kind="device"))
            return [back @ w]

        return step

    on_host = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    args = [f32(1024, 1024), f32(1024, 1024)]
    compiled = aot.compile_step(make, args, [P("data"), P()], [P("data")], (), Target(target), (4, 2), AXES)
    assert compiled.memory["host_temp"] == 1024 * 1024 * 4 / 4
    moved = aot.compile_step(
        lambda mesh: lambda x: [jax.device_put(x, NamedSharding(mesh, P("data"), memory_kind="device")) + 1.0],
        [f32(1024, 1024)], [on_host], [P("data")], (), Target(target), (4, 2), AXES,
    )  # fmt: skip
    assert moved.memory["host_argument"] == 1024 * 1024 * 4 / 4


@pytest.mark.parametrize("target", [needs("v5e:2x4"), needs("cpu:8")])
def test_the_child_compiles_what_jit_compiles(target):
    target = Target(target)
    mesh = jax.sharding.Mesh(target.device_array((4, 2)), AXES)
    jitted = jax.jit(
        make_mlp_step(mesh),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in IN),
        out_shardings=[NamedSharding(mesh, spec) for spec in OUT],
        donate_argnums=(0, 1, 2, 3),
    )
    here = jitted.lower(*ARGS).compile().memory_analysis()
    there = compile_mlp(target.name, (4, 2)).memory
    assert there["temp"] == here.temp_size_in_bytes
    assert there["argument"] == here.argument_size_in_bytes
    assert there["alias"] == here.alias_size_in_bytes


@pytest.mark.parametrize(("shape", "count"), [((32, 16), 512)])
@pytest.mark.parametrize("target", [needs("v5p:8x8x8")])
def test_a_target_of_many_more_devices_than_here(target, shape, count):
    compiled = compile_mlp(target, shape)
    assert f"num_partitions={count}" in compiled.text
    assert compiled.memory["argument"] < ARGS[0].size * 4


def test_more_cpu_devices_than_here():
    compiled = compile_mlp("cpu:16", (8, 2))
    assert "num_partitions=16" in compiled.text and len(jax.devices()) == 8


@pytest.mark.parametrize("target", [needs("v5e:2x4"), needs("v5p:2x2x2"), needs("v4:2x2x2"), needs("tpu7x:2x2x1")])
def test_a_program_that_does_not_fit_says_how_much(target):
    target = Target(target)
    side = 65536
    with pytest.raises(aot.CompilerOutOfMemory) as caught:
        aot.compile_step(
            lambda mesh: lambda a, b, c, d, e: [a @ b, c @ d, e @ a],
            [f32(side, side)] * 5, [P()] * 5, [P()] * 3, (), target, (4, 2), AXES,
        )  # fmt: skip
    assert caught.value.needed_bytes >= 5 * side * side * 4
    older = 0.01 if target.chip.name in ("v5p", "tpu7x") else 0.0  # GiB that libtpu left more before 0.0.50
    expected = [pytest.approx(target.chip.hbm_bytes + more * GIB, rel=1e-6) for more in (0.0, older)]
    assert caught.value.limit_bytes in expected
    needed = f"{caught.value.needed_bytes / GIB:.2f} GiB of {caught.value.limit_bytes / GIB:.2f} GiB"
    assert str(caught.value) == f"the program does not fit one device of {target}: it needs {needed}"


@pytest.mark.parametrize("target", [needs("v5e:2x4")])
def test_a_memory_limit_is_the_compilers_limit(target):
    side, mib = 4096, 2**20

    def compile_with(limit):
        make = lambda mesh: lambda x, w: [jnp.tanh(x @ w)]  # noqa: E731
        specs = [P("data"), P(None, "model")]
        return aot.compile_step(
            make, [f32(side, side)] * 2, specs, [P("data", "model")], (), Target(target), (4, 2), AXES, memory_limit_bytes=limit
        )

    needed = compile_with(None).device_bytes
    assert compile_with(needed + 64 * mib).device_bytes <= needed + 64 * mib
    with pytest.raises(aot.CompilerOutOfMemory) as caught:
        compile_with(40 * mib)
    assert caught.value.limit_bytes == 40 * mib < caught.value.needed_bytes <= needed


def test_out_of_memory_messages_of_other_compilers_are_read():
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 88.50G of 15.75G hbm."
    failure = aot._failure(text, Target("v5e:2x4"))
    assert isinstance(failure, aot.CompilerOutOfMemory)
    assert (failure.needed_bytes, failure.limit_bytes) == (int(88.5 * GIB), int(15.75 * GIB))
    silent = aot._failure("RESOURCE_EXHAUSTED: too big", Target("v5e:2x4"))
    assert isinstance(silent, aot.CompilerOutOfMemory) and silent.limit_bytes == 0
    assert "the program does not fit one device of v5e:2x4: RESOURCE_EXHAUSTED: too big" in str(silent)


def test_a_refused_program_is_a_failure_with_the_compilers_words():
    with pytest.raises(aot.CompilerFailure, match="the compiler for cpu:8 failed: MLIRError: Unable to parse module") as caught:
        aot.compile_module("not a module", Target("cpu:8"), (4, 2))
    assert isinstance(caught.value, JaxAutoError) and "custom op 'not'" in caught.value.text


def test_a_compiler_that_takes_too_long_is_ended_and_the_next_call_works():
    with pytest.raises(aot.CompilerFailure, match=r"the compiler for cpu:4 did not finish within 0.001 s"):
        compile_mlp("cpu:4", (4, 1), timeout=0.001)
    assert compile_mlp("cpu:4", (4, 1)).memory["argument"] > 0


def test_a_worker_stays_warm_and_is_replaced_when_it_died():
    target = Target("cpu:8")
    compile_mlp(target.name, (4, 2))
    child = aot._worker_for(target)._child
    compile_mlp(target.name, (2, 4))
    assert aot._worker_for(target)._child is child
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert compile_mlp(target.name, (4, 2)).memory["argument"] > 0


def test_a_worker_that_dies_while_compiling_is_a_failure():
    worker = aot._worker_for(Target("cpu:2"))
    compile_mlp("cpu:2", (2, 1))
    pid = worker._child.process.pid
    os.kill(pid, signal.SIGSTOP)  # alive when asked, dead before it answers
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    start = time.perf_counter()
    with pytest.raises(aot.CompilerFailure, match="the compiler process for cpu:2 died"):
        compile_mlp("cpu:2", (2, 1), timeout=60)
    killer.join()
    assert time.perf_counter() - start < 30


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compilers, "_PACKAGES", {"tpu": ("no-such-package",), "gpu": (), "cpu": ("jaxlib",)})
    assert aot.compiler_for(Target("v5e:2x4")) is None
    with pytest.raises(TargetError, match=r"no compiler for v5e:2x4 is installed here: pip install 'jaxauto\[tpu-aot\]'"):
        compile_mlp("v5e:2x4", (4, 2))
    with pytest.raises(TargetError, match=r"no compiler for h100:8 is installed here: pip install 'jaxauto\[gpu-aot\]'"):
        Target("h100:8").devices()


def test_a_mesh_that_is_not_the_targets_is_refused_before_anything_is_compiled():
    with pytest.raises(TargetError, match="a mesh of 4x4 = 16 devices does not fit target cpu:8"):
        compile_mlp("cpu:8", (4, 4))


@pytest.mark.parametrize(
    "target", [needs("v5e:2x4"), needs("v5p:4x4x4"), needs("v4:2x2x2"), needs("tpu7x:2x2x1"), needs("v6e:1x1"), needs("h100:2x8")]
)
def test_ahead_of_time_devices_are_detected_as_their_target(target):
    before = dict(os.environ)
    devices = Target(target).devices()
    assert len(devices) == Target(target).num_devices
    assert detect(devices) == Target(target)
    assert jax.devices()[0].platform == "cpu" and dict(os.environ) == before


def test_the_callers_script_is_not_run_again_and_nothing_is_printed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import jax, jax.numpy as jnp
        from jax.sharding import PartitionSpec as P
        from jaxauto import aot
        from jaxauto.targets import Target
        print("script")
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        compiled = aot.compile_step(lambda mesh: lambda x: [x @ x], [x], [P("d")], [P("d")], (0,), Target("cpu:4"), (4,), ("d",))
        print(compiled.memory["alias"], len(jax.devices()))
        """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert done.stdout == "script\n64 1\n"
    assert "Traceback" not in done.stderr
