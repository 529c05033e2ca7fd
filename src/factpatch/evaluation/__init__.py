"""Any EditMethod, measured on revisions."""

from factpatch.data.revisions import editable, teachable
from factpatch.evaluation.measure import measure, predicted_now
from factpatch.evaluation.run import evaluate, precise, sampled, select, tries

__all__ = ["editable", "evaluate", "measure", "precise", "predicted_now", "sampled", "select", "teachable", "tries"]
