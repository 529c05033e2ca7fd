"""Any EditMethod, measured on revisions."""

from factpatch.evaluation.measure import editable, measure, teachable
from factpatch.evaluation.run import evaluate, sampled, select, tries

__all__ = ["editable", "evaluate", "measure", "sampled", "select", "teachable", "tries"]
