"""Steps to measure rematerialisation with, as written under a ``jax.checkpoint`` policy; compilers that answer once; a sweep."""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench_models
import bench_vision
import jax
from layouts import Layout, compiled
from models import Decoder, step_and_args

from jaxauto import aot, hlo
from jaxauto.errors import InfeasibleError
from jaxauto.targets.compilers import COMPILER_OPTIONS
from jaxauto.targets.target import Target
from jaxauto.verify import schedule_on

RESULTS = Path(__file__).resolve().parent / "results"
UNLIMITED = 1e15

GPT2_MEDIUM = Decoder(24, 1024, 16, 16, 4096, 50304, length=1024)
LLAMA_1B = Decoder(16, 2048, 32, 8, 8192, 128256, length=1024)
VIT_L = Decoder(24, 1024, 16, 16, 4096, 0, length=0)
WHISPER = Decoder(6, 512, 8, 8, 2048, 51865, length=448)
MIXTURE = Decoder(8, 1024, 16, 16, 3584, 32768, length=1024)
RECURRENT = Decoder(12, 1024, 16, 16, 4096, 32768, length=512).with_(hidden=2048)


@dataclass(frozen=True)
class Case:
    """``make(batch)`` is (step, arguments); ``batch``: examples of one device. ``size``: what it is, for the tables."""

    make: Callable[[int], tuple[Callable, tuple]]
    batch: int
    size: str


def _decoder(config: Decoder, batch: int) -> tuple[Callable, tuple]:
    return step_and_args(config.with_(batch=batch))


CASES = {
    "GPT-2 medium": Case(partial(_decoder, GPT2_MEDIUM), 8, "24 layers, scanned, 1024 wide, 1024 tokens"),
    "GPT-2 medium, unrolled": Case(partial(_decoder, GPT2_MEDIUM.with_(scan=False, layers=4)), 8, "4 of the 24 layers, unrolled"),
    "Llama 1B": Case(partial(_decoder, LLAMA_1B), 4, "16 layers, scanned, 2048 wide, 1024 tokens"),
    "ViT-L": Case(
        lambda n: bench_vision.vit(VIT_L.with_(batch=n), 256, 16, 1024),
        32,
        "24 layers, scanned, 256 × 256 (XLA:GPU of this version fails on 196 patches)",
    ),
    "U-Net": Case(lambda n: bench_vision.unet(4, 64, 256, n), 16, "4 halvings, 64 channels, 256 × 256"),
    "Whisper-like": Case(lambda n: bench_models.encoder_decoder(WHISPER.with_(batch=n), 1536), 8, "base: 6 + 6 layers, scanned, 512 wide"),
    "MoE": Case(lambda n: bench_models.moe(MIXTURE.with_(batch=n)), 8, "8 layers, scanned, 8 experts, 1024 wide"),
    "LSTM": Case(lambda n: bench_models.lstm(1024, 32768, n, 256), 64, "2 layers, 1024 wide, 256 tokens"),
    "SSM": Case(lambda n: bench_models.ssm(RECURRENT.with_(batch=n)), 8, "12 layers, scanned, 2048 states, 512 tokens"),
}
DATA_PARALLEL = {"batch": "data", "groups": "data"}


def plan_under(make: Callable[..., Any], setting: str) -> Any:
    """``make(**options)`` with nothing recomputed ("off"), 5 % over the least memory that a plan can have ("full"), or half way ("chosen").

    Raises:
      jaxauto.InfeasibleError: no such plan.
    """
    if setting == "off":
        return make(remat="off", memory_budget=UNLIMITED)
    try:
        return make(memory_budget=1.001)
    except InfeasibleError as error:
        least = error.least_bytes
    assert least is not None
    if setting == "full":
        return make(memory_budget=least * 1.05)
    most = make(remat="off", memory_budget=UNLIMITED).estimate.peak_memory
    return make(memory_budget=(least + most) / 2)


def mesh_of(target: str) -> dict[str, int]:
    """All devices of a target on one axis."""
    return {"data": Target(target).num_devices}


def step_of(name: str, target: str) -> tuple[Callable, tuple]:
    """The step of a case, its batch in proportion to the devices."""
    case = CASES[name]
    return case.make(case.batch * Target(target).num_devices)


def as_written(name: str, target: str, policy: str) -> dict[str, Any]:
    """The step compiled data-parallel, state replicated, each block under a policy of ``layouts.POLICIES``; judged.

    Raises:
      aot.CompilerFailure: the compiler refused, or it does not fit the chip.
    """
    step, args = step_of(name, target)
    mesh, where = mesh_of(target), Target(target)
    state, batch = len(jax.tree.leaves(args[:2])), len(jax.tree.leaves(args[2]))
    specs = [jax.sharding.PartitionSpec()] * state + [jax.sharding.PartitionSpec("data")] * batch
    layout = Layout(aot.abstract_mesh(tuple(mesh.values()), tuple(mesh)), DATA_PARALLEL, policy)
    result = compiled(step, args, specs, layout, where, COMPILER_OPTIONS[where.chip.platform])
    return judged(target, mesh, result.text, result.device_bytes)


def judged(target: str, mesh: Mapping[str, int], text: str, device_bytes: float) -> dict[str, Any]:
    """Seconds by the roofline of the compiled schedule with its collectives; flops; bytes on one device."""
    module = hlo.parse(text)
    clock = schedule_on(Target(target), mesh, module)
    return {"seconds": clock.total_seconds, "compute": clock.compute_seconds, "flops": module.flops, "bytes": device_bytes}


def judged_plan(plan: Any) -> dict[str, Any]:
    """What ``judged`` says of a compiled plan, and what the planner thought."""
    compilation = plan.__dict__["compilation"]
    certificate = plan.certificate
    return {
        **judged(plan.target, plan.mesh.shape, compilation.text, compilation.device_bytes),
        "estimated seconds": plan.estimate.step_time,
        "estimated bytes": plan.estimate.peak_memory,
        "estimated flops": plan.estimate.flops,
        "rounds": certificate.rounds if certificate is not None else 0,
        "recomputed": sum(d.action == "recomputed" for d in plan.remat),
        "residuals": len(plan.remat),
    }


def sweep(description: str, name: str, measure: Callable[[str, str, dict, Callable[[], None]], None], table: Callable[[dict], str]) -> None:
    """The command line of a benchmark over ``CASES``: ``measure(case, target, found, save)`` adds what is not there yet."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="h100:1")
    parser.add_argument("--only", default="", help="cases whose name contains this; several parted by commas")
    parser.add_argument("--renew", action="store_true", help="measure anew what is there already")
    parser.add_argument("--keep", type=Path, help="a folder for compiled programs: the same program is compiled once")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    options = parser.parse_args()
    compile_once(options.keep)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def save() -> None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(table(found))

    for target in options.targets.split(","):
        for case in CASES:
            if any(part in case for part in options.only.split(",") if part or not options.only):
                if options.renew:
                    found.pop(f"{case} @ {target}", None)
                measure(case, target, found, save)
    save()
    aot.close_workers()


def compile_once(folder: Path | None) -> None:
    """The same program for the same target is compiled once in this process; with a ``folder`` to keep answers in, once for all."""
    known: dict[str, aot.Compiled | aot.CompilerFailure] = {}
    compile_module = aot.compile_module

    def cached(module: str, target: Target, mesh_shape: Any, *rest: Any, **more: Any) -> aot.Compiled:
        asked = repr((target.name, tuple(mesh_shape), rest, sorted((k, str(v)) for k, v in more.items() if k != "timeout")))
        key = hashlib.sha256((asked + module).encode()).hexdigest()[:32]
        path = folder / key if folder is not None else None
        if key not in known:
            if path is not None and path.exists():
                known[key] = pickle.loads(path.read_bytes())
            else:
                try:
                    known[key] = compile_module(module, target, mesh_shape, *rest, **more)
                except aot.CompilerOutOfMemory as error:
                    known[key] = error
                if path is not None and isinstance(known[key], aot.Compiled):
                    path.write_bytes(pickle.dumps(known[key]))
        answer = known[key]
        if isinstance(answer, aot.CompilerFailure):
            raise answer
        return answer

    aot.compile_module = cached
