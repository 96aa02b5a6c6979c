"""Figures are saved twice with caption and alternative text, and the same data give the same bytes."""

from __future__ import annotations

import base64
import json

import pytest

from specdec_core.evidence.figures import DPI, house_style, new_figure, read_captions, save_figure, series_styles, show


@pytest.fixture
def figure():
    with house_style():
        figure, (axes,) = new_figure(width=1, height=1)
        axes.plot([1, 2, 3], label="a")
    return figure


def test_a_figure_is_saved_as_png_and_pdf_with_its_caption(layout, figure):
    png = save_figure(figure, "02_b", " what is shown ", "a line", layout)
    save_figure(figure, "02_a", "another", "the same line", layout)
    assert png.read_bytes().startswith(b"\x89PNG") and png.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    captions = json.loads((layout.figures / "captions.json").read_text())
    assert list(captions) == ["02_a", "02_b"]
    assert captions["02_b"] == {"caption": "what is shown", "alt": "a line"}
    assert read_captions(layout) == captions


def test_saving_again_changes_no_byte(layout, figure):
    def saved() -> list[bytes]:
        save_figure(figure, "02_b", "caption", "alt", layout)
        return [path.read_bytes() for path in sorted(layout.figures.iterdir())]

    first = saved()
    assert saved() == first and len(first) == 3
    assert not any(b"CreationDate" in content for content in first)


def test_small_labels_keep_on_the_page_as_it_is_saved(layout):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with house_style():
        figure, (axes,) = new_figure(width=2.1, height=3)
        axes.imshow([[0.0] * 29] * 20, aspect="auto")
        axes.set_yticks(range(20), ["chunks of a prompt all from position 0"] * 20, fontsize=6)
    save_figure(figure, "02_a", "caption", "alt", layout)
    figure.set_dpi(DPI)
    FigureCanvasAgg(figure).draw()
    assert min(label.get_window_extent().x0 for label in axes.get_yticklabels()) >= 0


@pytest.mark.parametrize("name", ["a", "2_a", "02-a", "02_A", "02_a.png", "../02_a"])
def test_a_name_without_its_number_is_refused(layout, figure, name):
    with pytest.raises(ValueError, match="NN_name"):
        save_figure(figure, name, "caption", "alt", layout)


@pytest.mark.parametrize(("caption", "alt"), [("", "alt"), ("caption", " ")])
def test_caption_and_alternative_text_are_needed(layout, figure, caption, alt):
    with pytest.raises(ValueError, match="neither may be empty"):
        save_figure(figure, "02_a", caption, alt, layout)
    assert not layout.figures.exists()


def test_damaged_captions_are_named(layout, figure):
    layout.figures.mkdir()
    (layout.figures / "captions.json").write_text("{")
    with pytest.raises(ValueError, match=r"captions\.json is damaged"):
        save_figure(figure, "02_a", "caption", "alt", layout)


def test_a_notebook_shows_a_png_with_its_text_and_nothing_else(figure, monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, **options: shown.append((data, options)))
    show(figure, "a line")
    ((data, options),) = shown
    assert set(data) == {"image/png", "text/plain"} and data["text/plain"] == "a line"
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert options["metadata"] == {"image/png": {"alt": "a line"}}


def test_series_differ_by_colour_marker_and_line():
    styles = list(series_styles([f"s{n}" for n in range(8)]).values())
    assert len({style.color for style in styles}) == len({style.marker for style in styles}) == 8
    assert len({str(style.linestyle) for style in styles}) == 5
    assert series_styles(["a", "b"])["a"] == series_styles(["a"])["a"]


def test_the_house_style_ends_where_it_is_left():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with house_style():
        assert mpl.rcParams["pdf.fonttype"] == 42
    assert dict(mpl.rcParams) == before
