"""The picture of ``pgs loss --png``, drawn by matplotlib."""

from __future__ import annotations

import os
from pathlib import Path

from palingenesis.errors import MissingExtraError, RecordError
from palingenesis.findings.curve.analysis import CurveAnalysis

_SIZE, _DOTS_PER_INCH = (10.0, 5.0), 120
#: Positive losses that span more than this factor get a logarithmic axis.
_LOGARITHMIC = 30.0


def write_curve_picture(analysis: CurveAnalysis, path: str | os.PathLike[str]) -> Path:
    """Write a picture of the curve and return where it is.

    Raises:
        MissingExtraError: matplotlib is not installed.
        RecordError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "--png needs matplotlib, which is not installed: pip install 'palingenesis[plots]', or use --html"
        ) from None
    # A figure of its own: no state of pyplot's, no display.
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    loss = analysis.loss
    axes.plot(analysis.step, loss, color="0.7", linewidth=0.7, label="training loss")
    if analysis.course:
        label = "its law" if analysis.convergence is not None else "medians"
        axes.plot(analysis.course.step, analysis.course.value, color="C0", label=label)
    evaluated = analysis.log.live("eval/loss").finite
    if evaluated and analysis.loss_name != "eval/loss":
        axes.plot(evaluated.step, evaluated.value, "o-", color="C1", markersize=3, label="evaluation loss")
    for number, plateau in enumerate(analysis.plateaus):
        name = "plateau" if number == 0 else None
        axes.axvspan(plateau.first_step, plateau.last_step, color="C2", alpha=0.15, label=name)
    if analysis.spikes:
        steps, peaks = [one.step for one in analysis.spikes], [one.peak for one in analysis.spikes]
        axes.plot(steps, peaks, "v", color="C3", label="spike")
    if analysis.rise is not None:
        axes.axvline(analysis.rise.since_step, color="C3", linestyle="--", label="diverges")
    if len(loss) and loss.min() > 0 and loss.max() / loss.min() > _LOGARITHMIC:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(analysis.loss_name)
    axes.legend()
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
    except OSError as error:
        raise RecordError(
            f"the picture cannot be written to {path}: {error.strerror or error}; give a path you may write "
            "to"
        ) from None
    return Path(path)
