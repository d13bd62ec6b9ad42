"""The report of a comparison: a page that needs nothing else, and the same in pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from .board import board, run_of, timelines_of
from .comparison import Row, comparison_table
from .figures import costs, curves
from .measures import measures_figure
from .record import Record
from .timeline import draw_timelines
from .web import render

__all__ = ["Picture", "comparison_board", "comparison_pictures", "render", "write_comparison"]


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, by name."""

    name: str
    png: bytes

    @classmethod
    def of(cls, name: str, figure: Figure) -> Picture:
        """Draw a figure."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=140)
        return cls(name, buffer.getvalue())


def comparison_pictures(groups: Mapping[str, Sequence[Record]], rows: Sequence[Row]) -> list[Picture]:
    """The figures of a comparison; measures of methods only where there are any."""
    measured = {label: records[0].measures for label, records in groups.items() if records[0].measures}
    return [
        Picture.of("curves", curves(groups, {row.baseline for row in rows if row.baseline is not None})),
        Picture.of("timeline", draw_timelines({label: records[0].events for label, records in groups.items()})),
        Picture.of("costs", costs(rows)),
        *([Picture.of("measures", measures_figure(measured))] if measured else []),
    ]


def comparison_board(
    title: str,
    introduction: Sequence[str],
    groups: Mapping[str, Sequence[Record]],
    rows: Sequence[Row],
    *,
    first: str = "method",
    closing: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a comparison; arguments as in `write_comparison`."""
    baselines = {row.baseline for row in rows}
    timelines = timelines_of({label: records[0].events for label, records in groups.items()})
    by_label = {row.label: row for row in rows}
    runs = [
        run_of(label, records, row=by_label.get(label), timeline=timelines.get(label), baseline=label in baselines)
        for label, records in groups.items()
    ]
    return board(
        title,
        runs,
        introduction=introduction,
        table=comparison_table(rows, first, sentences=False),
        notes=[row.sentence or None for row in rows],
        closing=closing,
        footer=_footer(groups),
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
    closing: Sequence[str] = (),
) -> None:
    """Write the report of a comparison, and its figures as files of their own if `figures` names a folder.

    **Arguments:**

    - `groups`: runs by label, several where they differ only by chance.
    - `rows`: from `rows_of`; a row that another one is compared with is drawn as a baseline.
    - `first`: the head of the first column.
    - `closing`: what is said at the end of the page.
    """
    document = comparison_board(title, introduction, groups, rows, first=first, closing=closing)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(document), encoding="utf-8")
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for picture in comparison_pictures(groups, rows):
            (figures / f"{picture.name}.png").write_bytes(picture.png)


def _footer(groups: Mapping[str, Sequence[Record]]) -> list[str]:
    versions = next((r.versions for records in groups.values() for r in records if r.versions), {})
    known = [f"{name} {versions[name]}" for name in ("unlatch", "torch", "python", "platform") if name in versions]
    cores = [f"{versions['cores']} cores"] if "cores" in versions else []
    return [", ".join([*known, *cores])] if known else []
