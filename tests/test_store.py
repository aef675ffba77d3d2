"""Plans as files: saved, loaded, bound, refused, exported."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from zoo.nnx_models import MUTATING_STEPS

import jaxauto
from jaxauto import store
from jaxauto.blocks import find_blocks
from jaxauto.core import Decisions
from jaxauto.plan import Certificate
from jaxauto.policy import policy_table
from jaxauto.solve.remat import Remat

MESH = {"data": 4, "model": 2}


def make_step(activation=jnp.tanh, rate=0.1, *, extra_result=False):
    def loss_fn(params, key, x, y):
        for p in params["layers"]:
            x = x + activation(x @ p["up"]) @ p["down"]
        return jnp.mean((x + 0 * jax.random.normal(key, ()) - y) ** 2)

    def step(params, key, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, key, *batch)
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        return (params, {"loss": loss, "again": loss}) if extra_result else (params, {"loss": loss})

    return step


def make_args(width=16, hidden=32, batch=16, dtype=np.float32, layers=2):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, dtype)

    params = {"layers": [{"up": array(width, hidden), "down": array(hidden, width)} for _ in range(layers)]}
    return params, jax.random.key(3), (array(batch, width), array(batch, width))


@pytest.fixture(scope="module")
def plan():
    return jaxauto.plan(
        make_step(), *make_args(), mesh=MESH, constraints={"0.layers.*.up": P(None, "model"), "2.*": P("data")}, certify=False
    )


@pytest.fixture
def saved(plan, tmp_path):
    return plan.save(str(tmp_path / "plan.json"))


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


class TestSaveAndLoad:
    def test_everything_that_is_said_comes_back(self, plan, saved):
        loaded = jaxauto.Plan.load(saved)
        assert loaded.summary() == plan.summary()
        names = "in_paths out_paths in_specs out_specs donated decisions remat notes fingerprint target budget_bytes solver"
        for name in names.split():
            assert getattr(loaded, name) == getattr(plan, name), name
        assert loaded.specs == plan.specs and loaded.estimate.as_dict() == plan.estimate.as_dict()
        assert [(a.shape, a.dtype) for a in loaded.in_avals] == [(a.shape, a.dtype) for a in plan.in_avals]
        assert isinstance(loaded.mesh, AbstractMesh) and dict(loaded.mesh.shape) == MESH

    def test_decisions_of_every_kind_come_back(self, plan):
        decisions = Decisions(
            values={3: (("data", "model"), ())},
            operands={(4, 1): ((), ("model",))},
            kept=(None, frozenset({9, 7})),
            gathered_late={(4, 1): 2, (8, 0): None},
            in_order=frozenset({5, 6}),
            short=frozenset({6}),
        )
        changed = dataclasses.replace(plan, decisions=decisions, notes=("one",), program=None)
        assert store.from_dict(json.loads(json.dumps(store.to_dict(changed)))).decisions == decisions

    def test_the_file_names_its_decisions(self, saved):
        with open(saved) as file:
            data = json.load(file)
        named = [d for d in data["decisions"]["values"] if "dot_general" in d.get("name", "")]
        assert named and all("test_store.py" in d["source"] for d in named)

    def test_the_certificate_and_meshes_that_do_not_fit_come_back(self, plan):
        solver = dataclasses.replace(plan.solver, meshes={"4x2": 1.0, "8": float("inf")})
        changed = dataclasses.replace(plan, certificate=Certificate("cpu", 10.0, 20.0, 1), solver=solver)
        back = store.from_dict(json.loads(json.dumps(store.to_dict(changed), allow_nan=False)))
        assert back.certificate == changed.certificate and back.solver == solver

    def test_loading_and_saving_again_gives_the_same_file_but_for_names(self, saved, tmp_path):
        again = jaxauto.Plan.load(saved).save(str(tmp_path / "again.json"))
        assert jaxauto.Plan.load(again).decisions == jaxauto.Plan.load(saved).decisions

    def test_a_failed_write_leaves_the_old_file(self, plan, saved, monkeypatch):
        before = pathlib.Path(saved).read_text()
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            plan.save(saved)
        assert pathlib.Path(saved).read_text() == before
        assert os.listdir(os.path.dirname(saved)) == ["plan.json"]


class TestFilesThatAreNoPlans:
    def refused(self, tmp_path, text):
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(jaxauto.JaxAutoError) as caught:
            jaxauto.Plan.load(str(path))
        assert str(path) in str(caught.value)
        return str(caught.value)

    @pytest.mark.parametrize("text", ["", "not json", "[1, 2]", '{"a": 1}', '{"format": "other"}'])
    def test_other_files(self, tmp_path, text):
        assert 'is not a plan: it is no JSON object with "format": "jaxauto.plan"' in self.refused(tmp_path, text)

    def test_binary_files(self, tmp_path):
        (tmp_path / "x").write_bytes(bytes(range(256)))
        with pytest.raises(jaxauto.JaxAutoError, match="is not a plan"):
            jaxauto.Plan.load(str(tmp_path / "x"))

    def test_newer_version(self, tmp_path):
        message = self.refused(tmp_path, json.dumps({"format": "jaxauto.plan", "version": store.VERSION + 1}))
        assert f"format version {store.VERSION + 1}; this one reads up to {store.VERSION}. Upgrade jaxauto, or plan again." in message

    @pytest.mark.parametrize("key", ["mesh", "arguments", "decisions", "estimate", "solver", "fingerprint"])
    def test_damaged(self, saved, tmp_path, key):
        with open(saved) as file:
            data = json.load(file)
        del data[key]
        assert f"is a damaged plan (KeyError: '{key}')" in self.refused(tmp_path, json.dumps(data))

    def test_a_split_in_the_form_of_version_1(self, saved, tmp_path):
        with open(saved) as file:
            data = json.load(file)
        data["decisions"]["splits"] = [{"block": 0, "segments": [2], "rest": []}]
        assert "splits a loop in the form of version 1" in self.refused(tmp_path, json.dumps(data | {"version": 1}))


class TestBind:
    def test_a_bound_plan_runs_and_gives_the_same_numbers(self, plan, saved):
        args = make_args()
        expected = jax.jit(make_step())(*args)
        bound = jaxauto.Plan.load(saved, make_step(), *args)
        assert isinstance(bound.mesh, Mesh) and bound.in_shardings[0]["layers"][0]["up"].spec == P(None, "model")
        same(bound.jit()(*make_args()), expected)
        same(plan.jit()(*make_args()), expected)

    def test_the_decorator_takes_a_loaded_plan(self, saved):
        run = jaxauto.auto_shard(make_step(), plan=jaxauto.Plan.load(saved))
        same(run(*make_args()), jax.jit(make_step())(*make_args()))

    def test_objects_that_change_in_place(self, tmp_path):
        factory = MUTATING_STEPS["nnx_mutated"]
        step, args = factory()
        planned = jaxauto.auto_shard(step, mesh={"data": 8}, certify=False)
        path = planned.plan(*args).save(str(tmp_path / "nnx.json"))
        run = jaxauto.auto_shard(step, plan=jaxauto.Plan.load(path))
        _, other_args = factory()
        other_step = nnx.jit(step)
        for _ in range(2):
            same(run(*args), other_step(*other_args))

    def test_a_plan_that_recomputes_still_does(self, plan, tmp_path):
        blocks = find_blocks(plan.program.graph)
        kept = tuple(frozenset() for _ in blocks)
        lean = dataclasses.replace(plan, decisions=dataclasses.replace(plan.decisions, kept=kept))
        bound = jaxauto.Plan.load(lean.save(str(tmp_path / "lean.json")), make_step(), *make_args())
        text = bound.lower().as_text()
        assert blocks and text.count("tanh") == 2 * plan.lower().as_text().count("tanh")
        same(bound.jit()(*make_args()), jax.jit(make_step())(*make_args()))

    def test_a_plan_for_more_devices_than_are_here_keeps_its_abstract_mesh(self, tmp_path):
        plan = jaxauto.plan(make_step(), *make_args(), target="v5p:2x2x4", certify=False)
        bound = jaxauto.Plan.load(plan.save(str(tmp_path / "p.json")), make_step(), *make_args())
        assert isinstance(bound.mesh, AbstractMesh) and bound.specs == plan.specs

    def test_an_unbound_plan_says_what_to_do(self, saved):
        with pytest.raises(jaxauto.PlanMismatchError, match=r"call plan\.bind\(step, \*args\) first"):
            jaxauto.Plan.load(saved).jit()(*make_args())

    @pytest.mark.parametrize(
        ("step", "args", "message"),
        [
            (make_step(), make_args(hidden=64), r"0\.layers\.0\.down has shape \[64, 16\]; the plan was made for shape \[32, 16\]"),
            (make_step(), make_args(dtype=jnp.bfloat16), r"0\.layers\.0\.down has dtype bfloat16; the plan was made for dtype float32"),
            (make_step(), make_args(layers=1), r"\(5 leaves, planned 7\): leaf 2 is 1, the plan has 0\.layers\.1\.down there"),
            (make_step(), make_args(layers=3), r"\(9 leaves, planned 7\): leaf 4 is 0\.layers\.2\.down, the plan has 1 there"),
            (make_step(jnp.sin), make_args(), r"the arguments fit, but the step is another program .*\(fingerprint \w+, planned \w+"),
            (make_step(extra_result=True), make_args(), r"another program .*; 6 results, planned 5"),
        ],
        ids=["layer size", "dtype", "fewer layers", "more layers", "activation", "more results"],
    )
    def test_another_step_is_refused(self, saved, step, args, message):
        with pytest.raises(jaxauto.PlanMismatchError, match=message):
            jaxauto.Plan.load(saved, step, *args)

    def test_another_constant_is_the_same_program(self, saved):
        bound = jaxauto.Plan.load(saved, make_step(rate=0.2), *make_args())
        same(bound.jit()(*make_args()), jax.jit(make_step(rate=0.2))(*make_args()))


class TestExport:
    def exported(self, plan):
        namespace = {}
        exec(compile(plan.export(), "exported.py", "exec"), namespace)
        return namespace

    def test_the_source_runs_a_step_with_the_plans_shardings(self, plan):
        module = self.exported(plan)
        assert module["SPECS"] == plan.specs and module["DONATE"] == (0,)
        mesh, args = module["make_mesh"](), make_args()
        step = module["jit_step"](make_step(), args, mesh)
        placed = jax.device_put(args, module["in_shardings"](args, mesh))
        params, metrics = step(*placed)
        assert params["layers"][0]["up"].sharding.spec == P(None, "model")
        same((params, metrics), jax.jit(make_step())(*make_args()))

    def test_the_source_needs_no_jaxauto(self, plan, tmp_path):
        (tmp_path / "exported.py").write_text(plan.export())
        check = "import sys, exported; assert not any(m.startswith('jaxauto') for m in sys.modules); print(len(exported.SPECS))"
        done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(len(plan.specs))

    def test_constraints_stand_at_the_lines_of_the_model(self, plan):
        lines = plan.export().splitlines()
        at = next(k for k, line in enumerate(lines) if "test_store.py" in line and "loss_fn" in line)
        assert lines[at].startswith("# ")
        pins = list(itertools.takewhile(lambda line: line.startswith("#     "), lines[at + 1 :]))
        times = [int(re.search(r"\((\d+) times\)$", pin).group(1)) if pin.endswith("times)") else 1 for pin in pins]
        assert sum(times) == 2  # layers
        assert all(pin.startswith("#     dot_general -> float32[16, 32]: x = constrain(x, mesh") for pin in pins)

    def test_the_policy_saves_what_the_plan_keeps(self, plan):
        solved = plan.program.solved
        blocks = Remat(solved.step.graph, solved.step.groups, solved.step.aliased, solved.target.chip).blocks
        kept = tuple(frozenset(v for v in b.residuals if plan.program.graph.values[v].producer.prim == "tanh") for b in blocks)
        changed = dataclasses.replace(plan, decisions=dataclasses.replace(plan.decisions, kept=kept))
        assert any(kept)
        policy = self.exported(changed)["checkpoint_policy"]()
        table = policy_table(plan.program.graph, changed.decisions)
        aval = jax.ShapeDtypeStruct((16, 32), jnp.float32)
        assert policy(jax.lax.tanh_p, aval, accuracy=None) is True
        assert policy(jax.lax.sin_p, aval) is False
        assert any(key[0] == "tanh" and all(turns) for key, turns in table.items())

    def test_a_loaded_plan_exports_its_shardings(self, saved):
        text = jaxauto.Plan.load(saved).export()
        assert "plan.bind(step, *args).export()" in text
        compile(text, "exported.py", "exec")
