"""The house style of figures, saving them (PNG and PDF, caption, alternative text) and showing them in notebooks.

Every series differs by colour, marker and line, so that a figure survives a grey printer and colour blindness. The
same data give the same bytes: no dates in files, no random placement.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from specdec_core.cache import atomic_write
from specdec_core.evidence.layout import Layout
from specdec_core.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_P = ParamSpec("_P")
DPI = 200
COLUMN = 3.4
"""Width in inches of one column of print; a figure is one or two of them wide."""

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "<")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Series:
    """How one series is drawn."""

    color: tuple[float, float, float]
    marker: str
    linestyle: Any


@contextmanager
def house_style() -> Iterator[None]:
    """Seaborn's paper context and colour-blind palette, for the figures made inside."""
    import matplotlib as mpl
    import seaborn as sns

    fixed = {
        "figure.dpi": 100,
        "savefig.dpi": DPI,
        "figure.constrained_layout.use": True,
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same on every machine
        "pdf.fonttype": 42,  # text stays text
        "svg.hashsalt": "specdec",
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.grid": True,
        "grid.linewidth": 0.4,
        "legend.frameon": False,
        "legend.fontsize": 7,
        "lines.markersize": 4,
        "lines.linewidth": 1.2,
    }
    style = sns.axes_style("whitegrid") | sns.plotting_context("paper") | fixed
    with mpl.rc_context(style):
        yield


def in_house_style(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """A drawing function that works inside `house_style`."""

    @wraps(draw)
    def styled(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with house_style():
            return draw(*args, **kwargs)

    return styled


def new_figure(
    width: float = 2.0, height: float = 2.4, panels: int = 1, lines: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure `width` columns wide, `height` inches high: so many lines of panels. Not registered with pyplot."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(width * COLUMN, height))
    axes = figure.subplots(lines, panels, squeeze=False, **options).ravel()
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def series_styles(names: list[str]) -> dict[str, Series]:
    """A style for each name; the same names in the same order look the same in every figure."""
    import seaborn as sns

    palette = sns.color_palette("colorblind", 10)
    return {
        name: Series(palette[number % 10], _MARKERS[number % len(_MARKERS)], _LINES[number % len(_LINES)])
        for number, name in enumerate(names)
    }


def with_bars(intervals: Sequence[Interval]) -> tuple[list[float], list[list[float]]]:
    """Estimates, and the distances to both ends as error bars; an open end is drawn as none."""
    below = [max(one.estimate - one.low, 0.0) for one in intervals]
    above = [one.high - one.estimate if math.isfinite(one.high) else 0.0 for one in intervals]
    return [one.estimate for one in intervals], [below, above]


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Plain numbers 1, 2, 5 of each decade between the ends as ticks."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [tick for decade in decades for digit in (1, 2, 5) if low <= (tick := digit * 10.0**decade) <= high]
    axis.set_ticks(inside, [f"{tick:g}" for tick in inside])
    axis.set_ticks([], minor=True)


def legend_below(figure: Figure, panels: Sequence[Axes], first: Sequence[str]) -> None:
    """One legend for all panels, under them where it never covers data; the series `first`, then the guides."""
    labelled = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels)
    found = {label: handle for panel in labelled for handle, label in panel}
    entries = {label: found[label] for label in (*first, *(label for label in found if label not in first))}
    longest = max((len(label) for label in entries), default=1)
    per_row = max(1, min(len(entries), int(figure.get_figwidth() / (0.45 + 0.062 * longest))))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=per_row)


def save_figure(figure: Figure, name: str, caption: str, alt: str, layout: Layout | None = None) -> Path:
    """Save as figures/NN_name.png and .pdf and enter caption and alternative text in captions.json; returns the PNG.

    caption  says what is shown, n, how intervals were made, on what device.
    ValueError for a name that is not NN_name, or an empty caption or alternative text.
    """
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", name):
        raise ValueError(f"a figure is named like its notebook, NN_name in lower case; got {name!r}")
    if not caption.strip() or not alt.strip():
        raise ValueError(f"figure {name!r} needs a caption and an alternative text: neither may be empty")
    folder = (layout or Layout()).figures
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it warns of the date of a font that is embedded in PDFs
    with house_style():
        figure.set_dpi(DPI)  # small type is wider or narrower at another one: lay it out as it is saved
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: each further pass would move things by a hair
        for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None, "Producer": None})):
            with atomic_write(folder / (name + suffix)) as temporary:
                figure.savefig(temporary, format=suffix[1:], dpi=DPI, metadata=metadata)
    captions = read_captions(layout)
    captions[name] = {"caption": caption.strip(), "alt": alt.strip()}
    with atomic_write(folder / "captions.json") as temporary:
        temporary.write_text(
            json.dumps(captions, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return folder / f"{name}.png"


def read_captions(layout: Layout | None = None) -> dict[str, dict[str, str]]:
    """Figure name → {caption, alt}; empty if there are no figures yet."""
    path = (layout or Layout()).figures / "captions.json"
    if not path.is_file():
        return {}
    try:
        captions = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"figures/{path.name} is damaged ({error}): delete it and draw the figures again") from error
    return dict(captions)


def show(figure: Figure, alt: str) -> None:
    """Display a figure in a notebook: a PNG only, with alternative text (checked cells compare no images)."""
    from IPython.display import display

    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    image = base64.b64encode(buffer.getvalue()).decode()
    display({"image/png": image, "text/plain": alt}, raw=True, metadata={"image/png": {"alt": alt}})


def show_saved(name: str, layout: Layout | None = None) -> None:
    """Display a saved figure in a notebook, with its alternative text, its caption under it."""
    from IPython.display import Markdown, display

    layout = layout or Layout()
    entry = read_captions(layout)[name]
    image = base64.b64encode((layout.figures / f"{name}.png").read_bytes()).decode()
    display({"image/png": image, "text/plain": entry["alt"]}, raw=True, metadata={"image/png": {"alt": entry["alt"]}})
    display(Markdown(f"**{name}.** {entry['caption']}"))
