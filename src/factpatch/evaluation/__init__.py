"""Any EditMethod, measured on revisions."""

from factpatch.evaluation.run import evaluate, sampled, select
from factpatch.evaluation.measure import editable, measure

__all__ = ["editable", "evaluate", "measure", "sampled", "select"]
