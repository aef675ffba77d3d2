"""The demo itself: plan, verify, train, compare with one device, draw. Called by demo.py once the devices are emulated."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import jax
import matplotlib as mpl
import numpy as np
from demo_model import BITS, Config, Corpus, Training, read_standard_library

import jaxauto

COMPARED_STEPS = 5
LOSS_TOLERANCE = 5e-3  # relative; bfloat16 has 8 bits of mantissa, so one rounding is off by up to 4e-3
EVALUATE_EVERY = 25
HELD_OUT_BATCHES = 4


def size_text(bytes_: float) -> str:
    """Bytes in MiB."""
    return f"{bytes_ / 2**20:.1f} MiB"


def compiled_bytes(compiled: jax.stages.Compiled) -> int:
    """What the compiler allocates on each device: arguments, temporaries, and outputs that reuse no argument."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


class Live:
    """A line that is rewritten on a terminal; elsewhere only the lines that are kept are printed."""

    def __init__(self):
        self.terminal = sys.stdout.isatty()

    def show(self, text: str) -> None:
        """Until the next line comes."""
        if self.terminal:
            print(f"\r\033[K{text}", end="", flush=True)

    def keep(self, text: str) -> None:
        """For good."""
        print(f"\r\033[K{text}" if self.terminal else text, flush=True)


def budget_bytes(training: Training, options: argparse.Namespace, batch: tuple) -> int | str | None:
    """The memory budget of a device. A percentage is of what the step compiles to when it is planned without a budget."""
    if not isinstance(options.budget, float):
        return options.budget
    print(f"\nplanning without a budget, to know what {options.budget:.0%} of it means")
    free = jaxauto.plan(training.step, jax.eval_shape(training.init), batch, mesh=options.mesh)
    unlimited_bytes = compiled_bytes(free.compile())
    budget = int(options.budget * unlimited_bytes)
    print(f"without a budget the step compiles to {size_text(unlimited_bytes)} a device; the budget is {size_text(budget)}")
    return budget


def is_within(plan: jaxauto.Plan) -> bool:
    """Prints compiled memory beside the budget; whether it fits."""
    needed_bytes = compiled_bytes(plan.compile())
    fits = needed_bytes <= plan.budget_bytes
    verdict = "within the budget" if fits else "FAILED: over the budget"
    print(f"{verdict}: compiled {size_text(needed_bytes)}, budget {size_text(plan.budget_bytes)} a device\n")
    return fits


def train(train_step, training: Training, corpus: Corpus) -> dict[str, list]:
    """Trains and shows it live.

    Args:
      train_step: the step under ``jaxauto.auto_shard``.
      training: the same step as written, with its configuration.
      corpus: what to train on.

    Returns:
      Losses in nats: ``"train"`` by step, ``"held out"`` as (step, loss).
    """
    config = training.config
    batches, held_out = corpus.batches(config, "train"), corpus.batches(config, "held out")
    held_out = [next(held_out) for _ in range(HELD_OUT_BATCHES)]
    evaluate = jax.jit(training.evaluate)
    batch = next(batches)
    state = train_step.plan(jax.eval_shape(training.init), batch).init(training.init)
    history: dict[str, list] = {"train": [], "held out": []}
    live, started, seconds = Live(), time.monotonic(), 0.0  # seconds: of the steps after the first
    for number in range(1, config.steps + 1):
        before = time.monotonic()
        state, metrics = train_step(state, batch)
        history["train"].append(float(metrics["loss"]))
        if number == 1:
            live.keep(f"first step after {time.monotonic() - started:.1f} s, compiling included")
        else:
            seconds += time.monotonic() - before
        batch = next(batches)
        evaluated = number in (1, config.steps) or number % EVALUATE_EVERY == 0
        if evaluated:
            history["held out"].append((number, float(np.mean([evaluate(state, one) for one in held_out]))))
        speed = f"{(number - 1) / seconds:5.2f} steps/s" if seconds else "  –   steps/s"
        recent, unseen = np.mean(history["train"][-10:]) * BITS, history["held out"][-1][1] * BITS
        text = f"step {number:4d}/{config.steps}   {speed}   bits per byte: train {recent:.3f}   held out {unseen:.3f}"
        (live.keep if evaluated else live.show)(text)
    return history


def train_plain(training: Training, corpus: Corpus, steps: int) -> list[float]:
    """The losses of the same first steps with the step as written, on one device."""
    with jax.default_device(jax.devices()[0]):
        state, step = jax.jit(training.init)(), jax.jit(training.step, donate_argnums=0)
        batches, losses = corpus.batches(training.config, "train"), []
        for _ in range(steps):
            state, metrics = step(state, next(batches))
            losses.append(float(metrics["loss"]))
    return losses


def agree(sharded: list[float], plain: list[float]) -> bool:
    """Prints the losses of both runs side by side; whether they agree."""
    print(f"\nthe same {len(plain)} steps on one device, with the step as written:")
    print("  step    sharded      plain    relative difference")
    differences = [abs(one - other) / abs(other) for one, other in zip(sharded, plain, strict=True)]
    for number, (one, other, difference) in enumerate(zip(sharded, plain, differences, strict=True), 1):
        print(f"  {number:4d}  {one:9.5f}  {other:9.5f}    {difference:.1e}")
    close = all(difference <= LOSS_TOLERANCE for difference in differences)  # a NaN is not
    verdict = "the losses agree" if close else "FAILED: the losses do not agree"
    print(f"{verdict}: largest relative difference {max(differences):.1e}, allowed {LOSS_TOLERANCE:.0e} (bfloat16 compute)")
    return close


def draw(path: Path, history: dict[str, list], live_bytes: np.ndarray) -> None:
    """Loss by step, and live memory along one step."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    left.plot(np.arange(1, len(history["train"]) + 1), np.array(history["train"]) * BITS, label="train", linewidth=1)
    left.plot(*zip(*((number, loss * BITS) for number, loss in history["held out"]), strict=True), "o-", label="held out")
    left.set(xlabel="step", ylabel="bits per byte", title="Training")
    left.legend()
    right.fill_between(np.arange(len(live_bytes)), live_bytes / 2**20, step="post", alpha=0.6)
    right.set(xlabel="equation of the step", ylabel="live MiB", title="Memory along the step as written, one device", ylim=(0, None))
    figure.savefig(path, dpi=120)


def run(options: argparse.Namespace) -> int:
    """The demo. Returns the exit code."""
    started = time.monotonic()
    config = Config(steps=options.steps, seed=options.seed)
    corpus, training = read_standard_library(), Training(config)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(training.init)["params"]))
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, JAX {jax.__version__}")
    print(f"{jax.device_count()} emulated devices, mesh {options.mesh or 'searched'}")
    print(f"text: Python's standard library, {len(corpus.train) / 1e6:.1f} MB in {corpus.files[0]} files, {corpus.files[1]} files held out")
    sizes = f"{config.layers} layers, width {config.width}, {parameters / 1e6:.2f} M parameters"
    print(f"model: {sizes}; batch {config.batch} × {config.length} bytes")

    batch = next(corpus.batches(config, "train"))
    try:
        budget = budget_bytes(training, options, batch)
        train_step = jaxauto.auto_shard(training.step, mesh=options.mesh, memory_budget=budget)
        plan = train_step.plan(jax.eval_shape(training.init), batch)
    except jaxauto.InfeasibleError as error:
        print(f"demo: nothing fits: {error}", file=sys.stderr)
        return 3
    except jaxauto.JaxAutoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print(f"\nthe plan, after {time.monotonic() - started:.0f} s:\n{plan}\n")
    print(f"estimated, and what the compiler made of it:\n{plan.verify()}\n")
    fits = options.budget is None or is_within(plan)

    history = train(train_step, training, corpus)
    plain = train_plain(training, corpus, min(COMPARED_STEPS, config.steps))
    same = agree(history["train"][: len(plain)], plain)

    path = Path(tempfile.mkdtemp(prefix="jaxauto-demo-")) / "training.png"
    timeline = jaxauto.profile(training.step, jax.eval_shape(training.init), batch).timeline
    draw(path, history, np.asarray(timeline.live_bytes, float))
    print(f"plot: {path}\n{time.monotonic() - started:.0f} s in all")
    return 0 if same and fits else 1
