"""The command line: what it prints, where, and its exit codes."""

import json
import runpy
import sys
import types

import pytest

import jaxauto
from jaxauto import cli

SOURCE = """
import jax, jax.numpy as jnp

def make_step():
    def step(w, batch):
        x, y = batch
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * grad, loss
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, (f32(64, 32), (f32(128, 64), f32(128, 32)))

def make_nothing():
    return 7

def make_big():
    step, _ = make_step()
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, (f32(65536, 65536), (f32(128, 65536), f32(128, 65536)))

def broken():
    raise RuntimeError("the user's own mistake")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a module of steps."""
    (tmp_path / "steps_of_cli_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "steps_of_cli_test", raising=False)
    return tmp_path


def run(capsys, *argv):
    """(exit code, stdout, stderr)."""
    code = cli.main(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


STEP = "steps_of_cli_test:make_step"


class TestPlan:
    def test_prints_the_plan_and_writes_what_is_asked(self, here, capsys):
        code, out, err = run(
            capsys, "plan", STEP, "--mesh", "data=4,model=2", "--save", "p.json", "--html", "p.html", "--export", "p.py", "--explain", "0"
        )
        assert (code, err) == (cli.DONE, "")
        assert "data=4 x model=2" in out and "Why not another" in out
        assert [line for line in out.splitlines() if line.startswith("written")] == ["written: p.json", "written: p.html", "written: p.py"]
        assert json.loads((here / "p.json").read_text())["format"] == "jaxauto.plan"
        assert (here / "p.html").read_text().startswith("<!doctype html>")
        compile((here / "p.py").read_text(), "p.py", "exec")

    def test_plans_for_a_target_and_a_budget(self, here, capsys):
        code, out, _ = run(capsys, "plan", STEP, "--target", "v5p:2x2x1", "--time-limit", "5")
        assert code == cli.DONE and "v5p:2x2x1" in out

    def test_infeasible_is_3_and_one_paragraph(self, here, capsys):
        code, out, err = run(capsys, "plan", "steps_of_cli_test:make_big", "--target", "cpu:8", "--budget", "1GiB", "--mesh", "data=8")
        assert (code, out) == (cli.INFEASIBLE, "")
        assert err.startswith("jaxauto: no plan fits 1.00 GiB on each of 8 x cpu: the least that any plan needs is")
        assert "Traceback" not in err and "\n\n" not in err

    @pytest.mark.parametrize(("ok", "code"), [(True, cli.DONE), (False, cli.OUTSIDE_TOLERANCE)])
    def test_verification_decides_the_exit_code(self, here, capsys, monkeypatch, ok, code):
        class Verification(types.SimpleNamespace):
            def __str__(self):
                return "estimate beside compiler"

        monkeypatch.setattr(jaxauto.Plan, "verify", lambda self: Verification(ok=ok))
        got, out, err = run(capsys, "plan", STEP, "--mesh", "data=8", "--verify")
        assert got == code and "estimate beside compiler" in out
        assert ("outside the tolerance" in err) is not ok


class TestBadInput:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["plan", "steps_of_cli_test"], "'steps_of_cli_test': name a function as pkg.module:make_step."),
            (["plan", "no_such_module:f"], "cannot import 'no_such_module' from"),
            (["plan", "steps_of_cli_test:nothing"], "has no function 'nothing'; it has make_step, make_nothing, make_big, broken."),
            (["plan", "steps_of_cli_test:make_nothing"], "must return (step, args), a function and the tuple of its arguments; it"),
            (["plan", STEP, "--mesh", "data:4"], "--mesh 'data:4': write axis names and sizes, each once, as in \"data=4,model=2\"."),
            (["plan", STEP, "--mesh", "data=2,data=4"], "--mesh 'data=2,data=4'"),
            (["plan", STEP, "--mesh", "data=16"], "mesh {'data': 16} needs 16 devices"),
            (["plan", STEP, "--target", "v99:4"], "v99"),
            (["plan", STEP, "--budget", "lots"], "memory_budget='lots'"),
            (["show", "missing.json"], "missing.json"),
            (["show", "steps_of_cli_test.py"], "is not a plan"),
            (["plan", STEP, "--mesh", "data=8", "--save", "no/such/folder/p.json"], "no/such/folder"),
        ],
    )
    def test_is_2_and_one_paragraph(self, here, capsys, argv, message):
        code, _, err = run(capsys, *argv)
        assert code == cli.BAD_INPUT
        assert message in " ".join(err.split())
        assert err.startswith("jaxauto: ") and "Traceback" not in err and "\n\n" not in err

    def test_the_users_own_errors_are_told_with_their_place(self, here, capsys):
        code, _, err = run(capsys, "plan", "steps_of_cli_test:broken")
        assert code == cli.BAD_INPUT
        assert "steps_of_cli_test:broken failed: RuntimeError: the user's own mistake" in " ".join(err.split()) and "--debug" in err

    def test_mistakes_at_import_are_told_too(self, here, capsys):
        (here / "wrong_of_cli_test.py").write_text("x = 1 / 0")
        code, _, err = run(capsys, "plan", "wrong_of_cli_test:f")
        assert code == cli.BAD_INPUT and "importing wrong_of_cli_test failed: ZeroDivisionError: division by zero." in " ".join(err.split())

    def test_an_internal_error_is_1_and_one_paragraph(self, capsys, monkeypatch):
        monkeypatch.setattr(cli, "_targets", lambda _: 1 / 0)
        code, _, err = run(capsys, "targets")
        assert code == cli.INTERNAL_ERROR
        assert err == "jaxauto: internal error: ZeroDivisionError: division by zero. Use --debug for the traceback.\n"

    def test_debug_raises(self, here):
        with pytest.raises(jaxauto.ArgumentError):
            cli.main(["plan", "no_such_module:f", "--debug"])
        with pytest.raises(RuntimeError, match="own mistake"):
            cli.main(["plan", "steps_of_cli_test:broken", "--debug"])

    @pytest.mark.parametrize("argv", [[], ["dance"], ["plan"], ["plan", STEP, "--time-limit", "soon"], ["targets", "extra"]])
    def test_usage(self, capsys, argv):
        code, out, err = run(capsys, *argv)
        assert (code, out) == (cli.BAD_INPUT, "") and err.startswith("usage: jaxauto")


class TestOtherCommands:
    def test_show_prints_a_saved_plan(self, here, capsys):
        _, planned, _ = run(capsys, "plan", STEP, "--mesh", "data=8", "--save", "p.json")
        code, shown, err = run(capsys, "show", "p.json", "--html", "p.html", "--explain")
        assert (code, err) == (cli.DONE, "")
        assert shown.startswith(planned.split("\n\nwritten")[0]) and "What binds memory" in shown
        assert "written: p.html" in shown

    def test_targets(self, capsys):
        code, out, _ = run(capsys, "targets")
        assert code == cli.DONE and all(name in out for name in ("v5p", "h100", "cpu"))

    def test_profile(self, here, capsys):
        code, out, err = run(capsys, "profile", STEP, "--target", "v5e:1", "--depth", "1", "--html", "q.html")
        assert (code, err) == (cli.DONE, "")
        assert "profile of step (v5e:1x1)" in out and "compute time" in out and "live after" in out and "written: q.html" in out
        assert (here / "q.html").read_text().startswith("<!doctype html>")

    def test_profile_of_one_device_of_a_mesh(self, here, capsys):
        code, out, err = run(capsys, "profile", STEP, "--mesh", "data=8")
        assert (code, err) == (cli.DONE, "") and "on each device of 8 ('data',)" in out

    @pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["profile", "--help"], ["targets", "--help"], ["show", "--help"]])
    def test_help(self, capsys, argv):
        code, out, _ = run(capsys, *argv)
        assert code == cli.DONE and out.startswith("usage: jaxauto")

    def test_python_m_runs_it(self, capsys, monkeypatch):
        monkeypatch.setattr(sys, "argv", ["jaxauto", "--help"])
        with pytest.raises(SystemExit) as stop:
            runpy.run_module("jaxauto", run_name="__main__")
        assert stop.value.code == cli.DONE and capsys.readouterr().out.startswith("usage: jaxauto")
