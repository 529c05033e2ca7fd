"""Evaluation of any EditMethod on a set of revisions, one edit at a time or with many facts together."""

from factpatch.evaluation.baselines import count_choices, select
from factpatch.evaluation.measure import measure, predicted_now
from factpatch.evaluation.merges import MAX_OTHERS, MERGES, MergeOptions
from factpatch.evaluation.run import evaluate, measuring_precision, sample_edits
from factpatch.evaluation.summary import Result, Summary
from factpatch.evaluation.together import Together, count_measured_edits

__all__ = [
    "MAX_OTHERS",
    "MERGES",
    "MergeOptions",
    "Result",
    "Summary",
    "Together",
    "count_choices",
    "count_measured_edits",
    "evaluate",
    "measure",
    "measuring_precision",
    "predicted_now",
    "sample_edits",
    "select",
]
