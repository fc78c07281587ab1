"""The record of advice on a rule."""

from typing import NamedTuple

from functional_jd.core.record_display import Table, displayed_as, number


def line_of(advice: "Advice") -> str:
    """Return verdict, rule and reason in one line."""
    return f"Advice: {advice.verdict}: {advice.rule}(). {advice.reason}"


def _table(advice: "Advice") -> Table:
    figures = advice._asdict()
    names = [name for name in figures if name not in ("verdict", "rule", "reason")]
    return line_of(advice), [], [[name, number(figures[name])] for name in names]


@displayed_as(_table)
class Advice(NamedTuple):
    """The result of `advise`: what to do, and the figures it rests on, as Python values.

    Attributes:
        verdict: `"keep the mean"`, `"rescale"` or `"project"`.
        rule: the name of the rule to try: `getattr(functional_jd, advice.rule)()`.
        reason: one sentence.
        conflict: the share of the pairs of objectives that conflict throughout the window, in [0, 1].
        imbalance: the ratio of the longest to the shortest gradient, of their medians over the window; at least 1.
        rank: the median effective rank divided by m, in (0, 1].
        noise: how much a cosine of two gradients varies from step to step: its standard deviation, the mean over pairs.
        rising: the share of the objectives whose loss rose over the window; NaN without losses.
    """

    verdict: str
    rule: str
    reason: str
    conflict: float
    imbalance: float
    rank: float
    noise: float
    rising: float
