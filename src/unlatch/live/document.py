"""Runs under observation in the words of the page, and the page with them as a server answers."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..io.run_folder import names_apart
from ..report.board import board, board_json, run_of, timelines_of
from ..report.web import render
from ..schedule.entries import Kind
from .following import Followed, Sight
from .server import Answer, PageServer

__all__ = ["DOCUMENT", "Watch", "serving"]

#: What the page asks for, beside itself.
DOCUMENT = "/document.json"

_CAPTIONS = {
    "timelines": (
        "Measured: of a run under way its last rounds, of one that has ended a few usual ones near its midst, all on "
        "one time scale. Where a row is empty, the stage waits for another one or for data."
    ),
    "costs": (
        "Speed is that of the last second or, of a run that has ended, the median over epochs, the first left out. "
        "Memory counts activations, kept inputs and graphs."
    ),
}
#: Milliseconds until a page asks again, while a run is under way and when none is: somebody may continue it.
_OFTEN, _SELDOM = 1000, 5000
#: Seconds in which several pages, or an impatient one, get the same document.
_SAME = 0.5


class Watch:
    """Some runs beside each other, looked at when somebody asks.

    **Arguments:**

    - `folders`: of the runs, in the order of the page.
    - `brief`: whether it is served only while the first run is under way: pages then ask as often at its end.
    """

    def __init__(self, folders: Sequence[Path], *, brief: bool = False) -> None:
        self._brief = brief
        self._runs = dict(zip(names_apart(folders), map(Followed, folders), strict=True))
        self._again = shlex.join(["unlatch", "show", *map(str, folders)])
        self._lock = threading.Lock()
        self._text: tuple[float, str] | None = None
        self._word: str | None = None
        self._closes = False

    @property
    def title(self) -> str:
        """What the runs are called together."""
        return " beside ".join(self._runs)

    def close(self, word: str | None = None) -> None:
        """Tell pages with the next document that it is the last one. **Arguments:** `word`: why, if all is not well."""
        with self._lock:
            self._closes, self._word, self._text = True, word, None

    def text(self) -> str:
        """The document as JSON."""
        with self._lock:
            if self._text is None or time.monotonic() - self._text[0] > _SAME:
                self._text = time.monotonic(), board_json(self._document())
            return self._text[1]

    def _document(self) -> dict[str, Any]:
        seen = {label: run.look() for label, run in self._runs.items()}
        lanes = timelines_of({label: sight.record.events for label, sight in seen.items()})
        runs = [
            run_of(
                label,
                [sight.record],
                timeline=_named(lanes.get(label), sight.record.summary.get("kinds", {})),
                status=sight.state,
                progress=_progress(sight),
                facts=_facts(sight),
                warnings=self._warnings(sight),
                by_epoch=True,
            )
            for label, sight in seen.items()
        ]
        often = self._brief or not all(sight.over for sight in seen.values())
        live = {"closes": self._closes, "again": self._again, "every": _OFTEN if often else _SELDOM}
        return board(self.title, runs, captions=_CAPTIONS) | {"live": live}

    def _warnings(self, sight: Sight) -> list[str]:
        why = self._word if sight.over and self._word is not None else sight.why
        return [*([why] if why is not None else []), *_on_lanes(sight), *sight.notes]


def _named(timeline: dict[str, Any] | None, costs: Mapping[str, str]) -> dict[str, Any] | None:
    """A timeline that tells what the method's own kinds of action are akin to: methods themselves are unknown here."""
    if timeline is None:
        return None
    kinds = []
    for kind in timeline["kinds"]:
        cost = costs.get(kind["kind"])
        if cost is not None and Kind.known(kind["kind"]) is None:
            akin = "other" if cost == "none" else cost
            kind = {**kind, "cost": akin, "words": f"{akin} ({kind['kind']})"}
        kinds.append(kind)
    return {**timeline, "kinds": kinds}


def _on_lanes(sight: Sight) -> list[str]:
    if sight.state != "running" or sight.lanes:
        return []
    return ["what its stages do is shown when it has ended; started with --live, it would be shown meanwhile"]


def _progress(sight: Sight) -> dict[str, Any]:
    """How far it is, as a share of all and in words."""
    if sight.state == "finished":
        share: float | None = 1.0
    elif sight.steps:
        share = min(1.0, sight.step / sight.steps)
    else:
        share = min(1.0, sight.epoch / sight.epochs) if sight.epochs else None
    under_way = sight.epoch if sight.over else min(sight.epoch + 1, sight.epochs or sight.epoch + 1)
    epochs = f"epoch {under_way}" + (f" of {sight.epochs}" if sight.epochs else "")
    steps = f"batch {sight.step:,}" + (f" of {sight.steps:,}" if sight.steps else "")
    return {"share": share, "text": f"{epochs}, {steps}" if sight.step else "no batch yet"}


def _facts(sight: Sight) -> list[tuple[str, str]]:
    summary = sight.record.summary
    staleness = [stage["staleness"] for stage in summary.get("stages", ()) if stage.get("staleness") is not None]
    losses = sight.record.losses[-10:]
    return [
        *([("method", str(summary["method"]))] if "method" in summary else []),
        *([("processes", str(summary["processes"]))] if "processes" in summary else []),
        *([("test accuracy", f"{summary['accuracy']:.1%}")] if summary.get("accuracy") is not None else []),
        *([("training loss", f"{sum(loss for _, loss in losses) / len(losses):.4f}")] if losses else []),
        *([("samples/s", f"{summary['samples_per_second']:,.0f}")] if summary.get("samples_per_second") else []),
        *([("bubble", f"{summary['bubble']:.0%}")] if summary.get("bubble") is not None else []),
        *([("staleness", f"{max(staleness):.3g}")] if staleness else []),
        *([("restarts", str(summary["restarts"]))] if summary.get("restarts") else []),
    ]


# ------------------------------------------------------------------ on a server


def serving(listener: socket.socket, watch: Watch) -> PageServer:
    """A server of the page of some runs, which begins when it is entered."""
    html = render(None, watch.title)
    page = Answer(html.encode(), "text/html; charset=utf-8", _policy(html))
    return PageServer(
        listener, {"/": lambda: page, DOCUMENT: lambda: Answer(watch.text().encode(), "application/json")}
    )


def _policy(html: str) -> str:
    """Nothing runs on the page but what it came with, and it asks nobody but us."""
    scripts, styles = _hashes(html, "script"), _hashes(html, "style")
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(html: str, tag: str) -> str:
    inline = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
