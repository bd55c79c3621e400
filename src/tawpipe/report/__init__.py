"""Timelines of a step as pictures, traces and pages."""

from tawpipe.report.bars import Bar, executed_bars, predicted_bars
from tawpipe.report.picture import draw_timeline
from tawpipe.report.summary import gaps, summary
from tawpipe.report.trace import write_chrome_trace

__all__ = ["Bar", "draw_timeline", "executed_bars", "gaps", "predicted_bars", "summary", "write_chrome_trace"]
