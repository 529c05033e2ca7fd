"""Tables and figures from the result folders of evaluate and train."""

from factpatch.report.canvas import find_matplotlib, write_figures
from factpatch.report.compare import contests
from factpatch.report.figures import list_figures
from factpatch.report.runs import read_runs
from factpatch.report.spreadsheets import write_tables
from factpatch.report.tables import main_table, terminal_table

__all__ = [
    "contests",
    "find_matplotlib",
    "list_figures",
    "main_table",
    "read_runs",
    "terminal_table",
    "write_figures",
    "write_tables",
]
