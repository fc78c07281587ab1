"""A diagnosis as text, with advice."""

from collections.abc import Sequence

from functional_jd.core.arguments import check_type
from functional_jd.core.record_display import as_text
from functional_jd.diagnostics.advise import Advice, advice_line
from functional_jd.diagnostics.diagnose import Diagnosis, diagnosis_table


def describe(diagnosis: Diagnosis, names: Sequence[str] | None = None, advice: Advice | None = None) -> str:
    """Format a diagnosis as a table, to print.

    Args:
        diagnosis: from `diagnose`; for a batch, the table has shapes instead of values.
        names: m names, for instance `objective_names(losses)`; `None`: the row indices.
        advice: from `advise`, for a last line with its rule and reason.

    Returns:
        One line for all rows, and one per row: its norm, its cosine with the direction, and its cosines with the other
        rows; from 9 rows on, the lowest of these and the name of that row.

    Raises:
        TypeError: no `Diagnosis`, names that are no list, or no `Advice`.
        ValueError: the number of names is not that of the rows.
    """
    check_type("describe", "diagnosis", diagnosis, Diagnosis, "Pass what diagnose returned.")
    table = as_text(diagnosis_table(diagnosis, names))
    if advice is None:
        return table
    check_type("describe", "advice", advice, Advice, "Pass what advise returned.")
    return f"{table}\n{advice_line(advice)}"
