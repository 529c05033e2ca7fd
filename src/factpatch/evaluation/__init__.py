"""Any EditMethod, measured on revisions."""

from factpatch.evaluation.measure import editable, measure, predicted_now, teachable
from factpatch.evaluation.run import evaluate, precise, sampled, select, tries

__all__ = ["editable", "evaluate", "measure", "precise", "predicted_now", "sampled", "select", "teachable", "tries"]
