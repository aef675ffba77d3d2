"""What a plan says of itself, as text and as a page."""

import html.parser
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxauto
from jaxauto import naming, tables
from jaxauto.alternatives import candidate_specs
from jaxauto.report import verification_html
from jaxauto.verify import Row, Traffic, Verification

LAYERS, BATCH, WIDTH, HIDDEN = 3, 64, 32, 48


def make_step(rate=0.1):
    def forward(params, x):
        for p in params["layers"]:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        return x @ params["head"]

    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((forward(p, batch["<x>"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"layers": [{"up": f32(WIDTH, HIDDEN), "down": f32(HIDDEN, WIDTH)} for _ in range(LAYERS)], "head": f32(WIDTH, 8)}
    return step, (params, {"<x>": f32(BATCH, WIDTH), "y": f32(BATCH, 8)})


@pytest.fixture(scope="module")
def plan():
    step, args = make_step()
    return jaxauto.plan(step, *args, mesh={"data": 4, "model": 2}, constraints={"0.layers.*.up": P(None, "model")}, certify=False)


def row(text, start):
    """The one line of ``text`` that begins with ``start``."""
    (found,) = [line for line in text.splitlines() if line.startswith(start)]
    return re.split(r"\s{2,}", found.strip())


class TestSummary:
    def test_header_names_mesh_target_budget_and_solver(self, plan):
        text = plan.summary()
        assert row(text, "mesh ")[1] == "data=4 x model=2"
        assert row(text, "target")[1] == "cpu:8"
        assert row(text, "memory budget")[1].endswith("on each device")
        assert row(text, "solver")[1].startswith(plan.solver.status)

    def test_layers_are_folded_into_one_row_with_spec_and_local_bytes(self, plan):
        local = tables.size(WIDTH * HIDDEN // 2 * 4)
        found = row(plan.summary(), "0.layers.[0-2].up")
        assert found[1:] == ["[32, 48]", "float32", 'P(None, "model")', f"3 x {local}"]

    def test_every_argument_is_in_exactly_one_row(self, plan):
        rows = [line for line in plan.summary().splitlines() if re.match(r"[01]\.", line)]
        assert len(rows) == 5  # up, down, head, x, y

    def test_time_and_memory_are_those_of_the_estimate(self, plan):
        text, e = plan.summary(), plan.estimate
        assert row(text, "step")[1] == tables.duration(e.step_time)
        assert row(text, "  of it exposed")[1] == tables.duration(e.exposed_comm_time)
        assert row(text, "peak")[1] == tables.size(e.peak_memory)
        assert row(text, "allocated, with the gaps in its heap")[1] == tables.size(e.allocated)
        assert sum(e.memory.values()) == pytest.approx(e.peak_memory)
        for name, bytes_ in e.memory.items():
            if bytes_ > 0:
                assert row(text.split("Memory of one device")[1], name)[1] == tables.size(bytes_)

    def test_collectives_are_counted_by_kind_and_axes(self, plan):
        text = plan.summary().split("Collectives of a step")[1]
        lines = [line for line in text.splitlines() if line.startswith(("all-", "reduce-", "collective-"))]
        assert sum(float(re.split(r"\s{2,}", line)[2]) for line in lines) == sum(c.count for c in plan.estimate.collectives) > 0

    def test_is_plain_and_at_most_120_wide(self, plan):
        assert "\x1b" not in plan.summary()
        assert max(map(len, plan.summary().splitlines())) <= tables.WIDTH

    def test_print_shows_it(self, plan):
        assert str(plan) == plan.summary()


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.cells, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


class TestHtml:
    def test_is_well_formed_self_contained_and_says_what_the_summary_says(self, plan, tmp_path):
        path = plan.to_html(str(tmp_path / "plan.html"))
        assert path.endswith("plan.html")
        text = (tmp_path / "plan.html").read_text()
        reader = Reader()
        reader.feed(text)
        assert not reader.open and not reader.links and "<script" not in text
        assert {"0.layers.[0-2].up", 'P(None, "model")', "data=4 x model=2", tables.duration(plan.estimate.step_time)} <= {*reader.cells}

    def test_escapes_names(self, plan):
        text = plan._repr_html_()
        assert "<x>" not in text and "1.&lt;x&gt;" in text


class TestExplain:
    def test_whole_plan_says_what_binds_memory_and_what_costs_time(self, plan):
        text = plan.explain()
        assert "with any of the levels of rematerialisation that were searched, takes less than" in text
        assert "Not covered: levels between those, mixtures of them that were not kept, meshes" in " ".join(text.split())
        for title in ("What binds memory", "Largest values alive", "What costs time: computation", "What costs time: communication"):
            assert title in text
        assert f"Peak {tables.size(plan.estimate.peak_memory)} of a budget of {tables.size(plan.budget_bytes)}" in text
        assert "dot_general" in text and "test_report.py" in text and "0.layers.[0-2].up" in text
        assert row(text.split("Mesh shapes")[1], "4x2")[1] == tables.duration(plan.estimate.step_time)

    def test_argument_is_solved_again_with_other_shardings(self, plan):
        text = plan.explain("0.layers.*.down")
        chosen = naming.spec_text(plan.specs["0.layers.0.down"])
        assert row(text, f"{chosen}  (chosen)")[2] == tables.duration(plan.estimate.step_time)
        others = [line for line in text.splitlines() if line.startswith("P(") and "(chosen)" not in line]
        assert len(others) == len(candidate_specs(2, {"data": 4, "model": 2})) - 1
        replanned = jaxauto.plan(
            *_with_args(),
            mesh={"data": 4, "model": 2},
            constraints={"0.layers.*.up": P(None, "model"), "0.layers.*.down": P(None, "data")},
            certify=False,
        )
        (line,) = [line for line in others if line.startswith('P(None, "data") ')]
        assert re.split(r"\s{2,}", line)[1] == tables.duration(replanned.estimate.step_time)
        assert re.split(r"\s{2,}", line)[3] == tables.size(replanned.estimate.peak_memory)

    def test_says_when_a_sharding_does_not_divide(self):
        step, args = make_step()
        odd = jax.tree.map(lambda a: jax.ShapeDtypeStruct(tuple(9 if n == 8 else n for n in a.shape), a.dtype), args)
        text = jaxauto.plan(step, *odd, mesh={"data": 8}, certify=False).explain("0.head")
        assert "does not divide: dimension 1 of size 9 into 8" in text

    def test_says_when_nothing_with_that_sharding_fits(self):
        def step(w, x):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            return w - 0.1 * grad, loss

        args = jax.ShapeDtypeStruct((2048, 2048), jnp.float32), jax.ShapeDtypeStruct((8, 2048), jnp.float32)
        text = jaxauto.plan(step, *args, mesh={"data": 8}, certify=False, memory_budget="12MiB").explain("0")
        assert re.search(r"P\(\) .* does not fit: the least it needs is (1[6-9]|[2-9]\d)\.\d\d MiB", text)

    def test_unknown_path_names_close_ones(self, plan):
        with pytest.raises(jaxauto.ArgumentError, match=r"no argument matches '0\.layer\.0\.up'; paths look like .*0\.layers\.0\.up"):
            plan.explain("0.layer.0.up")


def _with_args():
    step, args = make_step()
    return step, *args


class TestVerification:
    def made(self, compiled):
        rows = (
            Row("arguments", None, 2.0**20, "bytes"),
            Row("peak memory", 3.0 * 2**30, compiled, "bytes"),
            Row("allocated", None, compiled, "bytes"),
            Row("matrix flops", 2e9, 1e9, "flops"),
            Row("compute time", 1e-3, 2e-3, "seconds"),
        )
        collectives = (Traffic("all-reduce over data", 2048.0, 2.0, 0.0, 0.0),)
        return Verification("v5p:2x2x1", "TPU compiler <1>", rows, collectives, 3.5 * 2**30, 1.25, ("one note",))

    def test_text_sets_estimate_beside_compiler(self):
        text = str(self.made(4.0 * 2**30))
        assert row(text, "arguments") == ["arguments", "1.00 MiB"]
        assert row(text, "peak memory") == ["peak memory", "3.00 GiB", "4.00 GiB", "-25.0 %"]
        assert row(text, "matrix flops") == ["matrix flops", "2.00 Gflop", "1.00 Gflop", "+100.0 %"]
        assert row(text, "compute time") == ["compute time", "1.00 ms", "2.00 ms", "-50.0 %"]
        assert row(text, "all-reduce over data") == ["all-reduce over data", "2.00 KiB", "0 B", "2", "0"]
        assert "DOES NOT FIT: 4.00 GiB of a budget of 3.50 GiB" in text and "OUTSIDE the tolerance" in text and "- one note" in text

    def test_page_is_escaped(self):
        text = verification_html(self.made(3.2 * 2**30))
        assert "TPU compiler &lt;1&gt;" in text and "Fits: 3.20 GiB" in text


class TestNames:
    def test_only_full_products_are_folded(self):
        paths = ["0.a.0.b.1", "0.a.0.b.2", "0.a.1.b.1", "0.a.1.b.2", "0.a.2.b.1"]
        assert [(name, n) for name, n, _ in naming.fold_paths(paths)] == [("0.a.[0-1].b.[1-2]", 4), ("0.a.2.b.1", 1)]

    def test_ranges_with_gaps(self):
        assert [name for name, _, _ in naming.fold_paths([f"1.x_{k}.w" for k in (0, 1, 2, 5)])] == ["1.x_[0-2,5].w"]

    def test_argument_numbers_stay_apart(self):
        assert [name for name, _, _ in naming.fold_paths(["0.w", "1.w"])] == ["0.w", "1.w"]

    def test_numbers_with_leading_zeros_are_words(self):
        assert [name for name, _, _ in naming.fold_paths(["0.block_01.w", "0.block_02.w"])] == ["0.block_01.w", "0.block_02.w"]

    def test_words_in_the_middle_are_folded(self):
        names = ["1.mu.w", "1.mu.b", "1.nu.w", "1.nu.b", "1.w"]
        assert naming.fold_words(names) == [("1.{mu,nu}.w", 2, 0), ("1.{mu,nu}.b", 2, 1), ("1.w", 1, 4)]

    def test_specs_as_one_writes_them(self):
        spec = P("data", None, ("data2", "model"))
        assert naming.spec_text(spec) == 'P("data", None, ("data2", "model"))'
        assert eval(naming.spec_text(spec)) == spec

    @pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (2.5, "2.50 s"), (1.5e-3, "1.50 ms"), (2e-6, "2.00 µs"), (3e-9, "3 ns")])
    def test_durations(self, seconds, text):
        assert tables.duration(seconds) == text

    def test_local_shapes(self):
        assert naming.local_shape((6, 8, 5), P(("a", "b"), None), {"a": 2, "b": 3}) == (1, 8, 5)
