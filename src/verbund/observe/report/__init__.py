"""`report.html`: a run in one self-contained page, for people who would rather look than read numbers."""

from verbund.observe.report.page import write_report

__all__ = ["write_report"]
