"""A report as one HTML file that needs nothing else: table and pictures are inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from ..table import Table
from .comparison import Row, comparison_table
from .figures import costs, curves
from .measures import measures_figure
from .record import Record
from .timeline import draw_timelines

__all__ = ["Picture", "comparison_pictures", "render", "write_comparison"]

_TEMPLATE = "page.html"


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, with what it shows."""

    name: str
    title: str
    caption: str
    png: bytes

    @classmethod
    def of(cls, name: str, title: str, caption: str, figure: Figure) -> Picture:
        """Draw a figure."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140)
        return cls(name, title, caption, buffer.getvalue())

    @property
    def base64(self) -> str:
        """The picture as text, for embedding."""
        return base64.b64encode(self.png).decode("ascii")


def render(
    title: str,
    introduction: Sequence[str],
    table: Table,
    pictures: Sequence[Picture] = (),
    footer: Sequence[str] = (),
) -> str:
    """The page as text; everything is escaped.

    >>> "a &lt; b" in render("a < b", [], Table(("x",), (("1",),)))
    True
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("unlatch.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    values: dict[str, Any] = {"title": title, "introduction": introduction, "table": table}
    return environment.get_template(_TEMPLATE).render(**values, pictures=pictures, footer=footer)


def comparison_pictures(groups: Mapping[str, Sequence[Record]], rows: Sequence[Row]) -> list[Picture]:
    """The figures of a comparison; measures of methods only where there are any."""
    first = {label: records[0].events for label, records in groups.items()}
    measured = {label: records[0] for label, records in groups.items() if records[0].measures}
    return [
        Picture.of(
            "curves",
            "Learning",
            "Training loss (running mean of 5 batches) and test accuracy; means over runs where there are several.",
            curves(groups),
        ),
        Picture.of(
            "timeline",
            "The first steps",
            "What each stage did when, measured. White is idle: waiting for another stage or for data.",
            draw_timelines(first),
        ),
        Picture.of(
            "costs",
            "Speed and memory",
            "Speed is the median over epochs, the first left out. Memory counts activations, kept inputs and graphs.",
            costs(rows),
        ),
        *([_measures(measured)] if measured else []),
    ]


def _measures(records: Mapping[str, Record]) -> Picture:
    words = {name: text for record in records.values() for name, text in record.summary.get("measures", {}).items()}
    explained = "".join(f" {name}: {text}." for name, text in words.items())
    return Picture.of(
        "measures",
        "What the methods measure",
        f"Measurements of the methods themselves, the first run of each kind.{explained}",
        measures_figure({label: record.measures for label, record in records.items()}),
    )


def write_comparison(
    page: Path,
    title: str,
    introduction: Sequence[str],
    groups: Mapping[str, Sequence[Record]],
    rows: Sequence[Row],
    *,
    first: str = "method",
    figures: Path | None = None,
) -> None:
    """Write the report of a comparison, and its figures as files of their own if `figures` names a folder."""
    pictures = comparison_pictures(groups, rows)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(
        render(title, introduction, comparison_table(rows, first), pictures, _footer(groups)), encoding="utf-8"
    )
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (figures / f"{picture.name}.png").write_bytes(picture.png)


def _footer(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    versions = next((r.versions for records in groups.values() for r in records if r.versions), {})
    known = [f"{name} {versions[name]}" for name in ("unlatch", "torch", "python", "platform") if name in versions]
    cores = [f"{versions['cores']} cores"] if "cores" in versions else []
    return [", ".join([*known, *cores])] if known else []
