"""Any EditMethod, measured on revisions."""

from factpatch.evaluation.measure import editable, measure

__all__ = ["editable", "measure"]
