"""Live memory, drawn: the SVG of notebooks and pages, the matplotlib figure."""

import builtins
import functools
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest
from zoo import STEPS

import jaxauto
from jaxauto.picture import Columns
from jaxauto.timeline import short


@functools.cache
def profile_of(name):
    step, args = STEPS[name]()
    return jaxauto.profile(step, *args)


def pictures(prof):
    """The SVG elements of a profile's notebook form."""
    return [ElementTree.fromstring(x) for x in re.findall(r"<svg.*?</svg>", prof._repr_html_(), re.DOTALL)]


@pytest.mark.parametrize("name", ["transformer_loop", "linen_residual_net", "gradient_accumulation"])
def test_the_picture_is_of_the_timeline(name):
    prof = profile_of(name)
    (drawn,) = pictures(prof)
    texts = [t.text for t in drawn.iter("text")]
    assert set(prof.timeline.by_kind) <= set(texts)
    assert any(t.startswith(f"{short(prof.peak_memory, 'B')} at ") for t in texts)
    assert {"forward", "backward"} <= set(texts)


def test_the_picture_of_one_equation():
    (drawn,) = pictures(jaxauto.profile(jnp.tanh, jax.ShapeDtypeStruct((1000,), jnp.float32)))
    assert any(t.text.startswith("8 KB at ") for t in drawn.iter("text"))


def test_thinning_keeps_the_peak():
    line = profile_of("transformer_loop").timeline
    columns = Columns.of(line, 10)
    assert len(columns.positions) == 10 and line.peak_position in columns.positions
    assert columns.stacks.sum(axis=0).max() == pytest.approx(line.peak_bytes)


def test_a_plot(tmp_path):
    prof = profile_of("transformer_loop")
    figure = prof.timeline.plot(tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 1000
    (axes,) = figure.axes
    assert axes.get_ylabel() == "live GB"
    assert {text.get_text() for text in axes.get_legend().get_texts()} == set(prof.timeline.by_kind)


def test_without_matplotlib_plot_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ImportError, match=r"pip install 'jaxauto\[viz\]'"):
        profile_of("transformer_loop").timeline.plot()
