"""From measurements to claims: records, provenance, verdicts, figures, the notebook runner and the report.

This wing imports no torch and nothing of the engine, so figures and verdicts can be redrawn from records in seconds
on a machine that has neither. What is slow to import (matplotlib, scipy.stats, papermill) is imported where it is used.
"""
