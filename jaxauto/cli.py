"""The command line: ``jaxauto plan | profile | targets | show``.

Exit codes: 0 done, 2 bad usage or input, 3 infeasible, 4 verification outside tolerance.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from jaxauto.errors import ArgumentError, InfeasibleError, JaxAutoError

DONE, INTERNAL_ERROR, BAD_INPUT, INFEASIBLE, OUTSIDE_TOLERANCE = 0, 1, 2, 3, 4

_STEP_HELP = "pkg.module:make_step, a function of no arguments that returns (step, args); args: a tuple of arrays or ShapeDtypeStructs"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
      argv: the arguments; None: those of the process.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("jaxauto: interrupted", file=sys.stderr)
        return 130
    except _StepError as failed:
        if options.debug:
            raise failed.error from None
        _complain(str(failed))
        return BAD_INPUT
    except (JaxAutoError, OSError) as error:
        if options.debug:
            raise
        _complain(str(error))
        return INFEASIBLE if isinstance(error, InfeasibleError) else BAD_INPUT
    except Exception as error:
        if options.debug:
            raise
        _complain(f"internal error: {type(error).__name__}: {error}. Use --debug for the traceback.")
        return INTERNAL_ERROR


class _StepError(Exception):
    """The user's own function raised ``error``."""

    def __init__(self, name: str, error: Exception):
        super().__init__(f"{name} failed: {type(error).__name__}: {error}. Use --debug for the traceback.")
        self.error = error


def _complain(text: str) -> None:
    """One paragraph on stderr."""
    print(textwrap.fill(f"jaxauto: {' '.join(text.split())}", width=120, break_long_words=False, break_on_hyphens=False), file=sys.stderr)


# --------------------------------------------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxauto",
        description="Shardings and rematerialisation for a JAX train step, planned without the machine.",
        epilog="Exit codes: 0 done, 2 bad usage or input, 3 infeasible, 4 verification outside tolerance.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _plan_arguments(_command(commands, "plan", "plan a step and print what the plan is", _plan))
    _profile_arguments(_command(commands, "profile", "flops, bytes and live memory of a step, without running it", _profile))
    _command(commands, "targets", "the known chips with their numbers", _targets)
    show = _command(commands, "show", "print a saved plan", _show)
    show.add_argument("file", metavar="plan.json", help="a plan written by --save or plan.save")
    show.add_argument("--html", metavar="FILE", help="also write the plan as a page")
    show.add_argument("--explain", action="store_true", help="also say what binds memory and what costs time")
    return parser


def _command(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run)
    return command


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("step", metavar="pkg.module:make_step", help=_STEP_HELP)
    command.add_argument("--target", help='"v5p:4x4x4", "h100:8", "cpu:8"; default: the devices here')
    command.add_argument("--budget", metavar="MEMORY", help='memory of each device: bytes, "14GiB", "90%%" or a fraction such as 0.9')
    command.add_argument("--mesh", metavar="AXES", help='"data=4,model=2"; default: the shape is searched')
    command.add_argument("--remat", choices=("auto", "off", "offload"), default="auto", help="rematerialisation (default auto)")
    command.add_argument("--time-limit", metavar="SECONDS", type=float, default=60.0, help="for the solver (default 60)")
    command.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    command.add_argument("--html", metavar="FILE", help="write the plan as a page")
    command.add_argument("--export", metavar="FILE", help="write the plan as Python source that needs only jax")
    command.add_argument("--explain", metavar="PATH", nargs="?", const="", help="also say why; with an argument path: why that sharding")
    command.add_argument("--verify", action="store_true", help="compile for the target and set the estimate beside it")


def _profile_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("step", metavar="pkg.module:make_step", help=_STEP_HELP)
    command.add_argument("--target", help='"v5e:1", "h100:8": also count seconds on that chip')
    command.add_argument("--mesh", metavar="AXES", help='"data=4,model=2": numbers of one device of a mesh, the planner\'s sharding')
    command.add_argument("--depth", metavar="N", type=int, help="also a table by named scopes, cut after N components")
    command.add_argument("--html", metavar="FILE", help="write the profile as a page that needs nothing else")


# ---------------------------------------------------------------------------------------------------------------- commands


def _plan(options: argparse.Namespace) -> int:
    import jaxauto

    step, args = made_step(options.step)
    plan = jaxauto.plan(
        step,
        *args,
        mesh=mesh_of(options.mesh),
        target=options.target,
        memory_budget=budget_of(options.budget),
        remat=options.remat,
        time_limit=options.time_limit,
    )
    print(plan.summary())
    if options.explain is not None:
        print("\n" + plan.explain(options.explain or None))
    for file, write in (
        (options.save, plan.save),
        (options.html, plan.to_html),
        (options.export, lambda path: _write(path, plan.export())),
    ):
        if file:
            print(f"\nwritten: {write(file)}")
    if not options.verify:
        return DONE
    verification = plan.verify()
    print(f"\n{verification}")
    if not verification.ok:
        _complain("the compiled step is outside the tolerance of the estimate; the table above says where.")
    return DONE if verification.ok else OUTSIDE_TOLERANCE


def _profile(options: argparse.Namespace) -> int:
    from jaxauto.profile import profile

    step, args = made_step(options.step)
    found = profile(step, *args, mesh=mesh_of(options.mesh), target=options.target)
    print(found)
    if options.depth is not None:
        print(f"\n{found.table(depth=options.depth)}")
    if options.html:
        print(f"\nwritten: {found.to_html(options.html)}")
    return DONE


def _targets(_: argparse.Namespace) -> int:
    from jaxauto.targets import targets

    print(targets())
    return DONE


def _show(options: argparse.Namespace) -> int:
    from jaxauto.plan import Plan

    plan = Plan.load(options.file)
    print(plan.summary())
    if options.explain:
        print("\n" + plan.explain())
    if options.html:
        print(f"\nwritten: {plan.to_html(options.html)}")
    return DONE


def _write(path: str, text: str) -> str:
    from jaxauto.writing import write_text

    write_text(path, text)
    return path


# ------------------------------------------------------------------------------------------------------------------ inputs


def made_step(name: str) -> tuple[Callable, tuple]:
    """``"pkg.module:make_step"`` → (step, args); modules of the working directory are found.

    Raises:
      ArgumentError: no such module or function, or it returns something else.
    """
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise ArgumentError(f"{name!r}: name a function as pkg.module:make_step.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(f"cannot import {module_name!r} from {os.getcwd()}: {error}.") from error
    except Exception as error:  # whatever the user raises is told as their own
        raise _StepError(f"importing {module_name}", error) from error
    make = getattr(module, function, None)
    if not callable(make):
        known = [
            n for n, x in vars(module).items() if callable(x) and not n.startswith("_") and getattr(x, "__module__", "") == module_name
        ]
        raise ArgumentError(f"{module_name} has no function {function!r}; it has {', '.join(known[:8]) or 'none'}.")
    made = _called(make, name)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise ArgumentError(
            f"{name}() must return (step, args), a function and the tuple of its arguments; it returned a {type(made).__name__}."
        )
    return made[0], tuple(made[1])


def _called(make: Callable[[], Any], name: str) -> Any:
    try:
        return make()
    except Exception as error:  # whatever the user raises is told as their own
        raise _StepError(name, error) from error


def mesh_of(text: str | None) -> dict[str, int] | None:
    """``"data=4,model=2"`` → ``{"data": 4, "model": 2}``.

    Raises:
      ArgumentError: another form.
    """
    if text is None:
        return None
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (x.strip() for x in part.partition("="))
        if not (name.isidentifier() and equals and size.isdigit() and int(size) > 0) or name in mesh:
            raise ArgumentError(f'--mesh {text!r}: write axis names and sizes, each once, as in "data=4,model=2".')
        mesh[name] = int(size)
    return mesh


def budget_of(text: str | None) -> float | str | None:
    """A number stays a number (``0.9`` is a fraction, ``15e9`` bytes); anything else is text with a unit."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
