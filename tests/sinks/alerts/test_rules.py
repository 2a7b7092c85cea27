# SPDX-License-Identifier: Apache-2.0
"""Rules as people write them: read rightly, written back the same, and refused with what was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedvitals.catalog import CATALOG
from fedvitals.diagnosis import cases
from fedvitals.diagnosis.issues import table
from fedvitals.errors import ConfigError
from fedvitals.sinks.alerts import evaluation
from fedvitals.sinks.alerts.rules import SEVERITIES, UNITS, Condition, FindingCondition, Gap, parse, rule, unknown_names


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("update.norm > 5 × own median for 3 rounds", Condition("update.norm", ">", 5, "", "own", rounds=3)),
        ("update.norm>5x own median", Condition("update.norm", ">", 5, "", "own")),
        ("accuracy < 0.8 for 5 rounds", Condition("accuracy", "<", 0.8, rounds=5)),
        ("accuracy ≤ 80 %", Condition("accuracy", "<=", 80, "%")),
        ("time.round > 2 x own median", Condition("time.round", ">", 2, "", "own")),
        ("time.round > 250ms", Condition("time.round", ">", 250, "ms")),
        ("memory.resident > 8 GB", Condition("memory.resident", ">", 8, "GB")),
        ("clients.failed >= 3", Condition("clients.failed", ">=", 3)),
        ("accuracy drops by 0.03", Condition("accuracy", "drops", 0.03, "", "before")),
        ("loss rises by 2 within 5 rounds for 2 rounds", Condition("loss", "rises", 2, "", "before", 5, 2)),
        ("update.norm > 4 * cohort median", Condition("update.norm", ">", 4, "", "cohort")),
        ("update.cosine_mean < -0.5", Condition("update.cosine_mean", "<", -0.5)),
        ("user.my-score < 1e-3 for 1 round", Condition("user.my-score", "<", 1e-3)),
        ("finding", FindingCondition()),
        ("finding NAN_UPDATE", FindingCondition("NAN_UPDATE")),
        ("finding in system severity >= warning", FindingCondition(None, "system", "warning")),
        ("finding confidence >= 0.9 for 2 rounds", FindingCondition(confidence=0.9, rounds=2)),
    ],
)
def test_what_people_write(text, wanted):
    """Each form means what it says, and what it is written back as means the same."""
    assert parse(text) == wanted
    assert parse(str(wanted)) == wanted


def test_limits_are_in_the_metrics_own_unit():
    """A limit in GB is held against bytes, one in minutes against seconds, one in percent against a share."""
    texts = ("memory.resident > 8 GB", "memory.resident > 1 MiB", "time.round > 2 min", "accuracy < 80 %", "loss > 3")
    assert [parse(text).limit for text in texts] == [8e9, 2**20, 120, 0.8, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("update.nrom > 5", "Did you mean 'update.norm'"),
        ("my_score > 5", "'user.my_score'"),
        ("accuracy < 80", "'80 %' or 0.8"),
        ("memory.resident > 8", "write '8 GB'"),
        ("memory.resident > 8 s", "'s' is no unit of memory.resident, which is in bytes: write B, kB"),
        ("user.score > 8 GB", "write no unit"),
        ("accuracy", "after the metric comes a comparison"),
        ("accuracy = 3", "'= 3' is neither a word"),
        ("accuracy falls by 3", "'drops' or 'rises', got 'falls'"),
        ("accuracy <", "what comes after the comparison is missing"),
        ("accuracy < low", "is a number, got 'low'"),
        ("update.norm > 5 x its median", "'own' or 'cohort' was expected, got 'its'"),
        ("update.norm > 5 x own", "'median' was expected, got the end"),
        ("update.norm > -5 x own median", "a factor is above 0"),
        ("accuracy drops by 0", "a step is above 0"),
        ("accuracy < 0.5 for 0 rounds", "1 to 1000 whole rounds, got 0"),
        ("accuracy < 0.5 for 2.5 rounds", "whole rounds, got 2.5"),
        ("accuracy < 0.5 for 3 days", "'rounds' or 'round' was expected, got 'days'"),
        ("accuracy < 0.5 for 3 rounds please", "nothing more was expected from 'please' on"),
        ("loss > 1e999", "finite number"),
        ("finding severity >= bad", "'note' or 'warning' or 'critical' was expected, got 'bad'"),
        ("finding confidence >= 90", "between 0 and 1"),
        ("finding in 5", "after 'in' comes a family"),
        ("5 > loss", "begins with the name of a metric"),
        ("", "begins with the name of a metric"),
        ("loss > 5 " * 50, "at most 200 characters"),
    ],
)
def test_what_is_wrong_is_refused_with_what_was_meant(text, message):
    """Nothing is guessed; the error tells what of the text is wrong."""
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert message in str(error.value)


def test_settings_of_a_rule():
    """A rule is named after what it asks, unless it has a name; settings are checked as they come in."""
    made = rule("loss > 3", gap="10 min", severity="critical", node="c*", channels=["team"], resolved=False)
    assert (made.name, made.gap, made.gap.seconds, made.channels) == ("loss > 3", Gap(10, "min"), 600, ("team",))
    assert rule("loss > 3").gap == Gap(5, "rounds")
    for settings, said in (
        ({"gap": "soon"}, "'5 rounds', '30 s'"),
        ({"severity": "bad"}, "Unknown severity 'bad'"),
        ({"chanels": ["a"]}, "Did you mean 'channels'"),
        ({"channels": "team"}, "is a list of names"),
        ({"name": "two\nlines"}, "one line"),
        ({"resolved": "no"}, "true or false"),
    ):
        with pytest.raises(ConfigError) as error:
            rule("loss > 3", **settings)
        assert said in str(error.value)


def test_words_are_those_of_the_diagnosis():
    """Siblings may not import each other: what is written twice must stay the same."""
    assert evaluation.QUIET == cases.QUIET_ROUNDS
    assert set(SEVERITIES) == set(table.SEVERITIES)
    said = unknown_names(
        [rule("finding NAN_UPDTE"), rule("finding in clients"), rule("loss > 1")], {"NAN_UPDATE": "client"}
    )
    assert len(said) == 2
    assert "Did you mean 'NAN_UPDATE'" in said[0]
    assert "Did you mean 'client'" in said[1]


numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-300, allow_infinity=False, allow_nan=False)
rounds = st.integers(1, 1000)
comparisons = st.sampled_from([">", ">=", "<", "<="])


@st.composite
def limits(draw):
    metric = draw(st.sampled_from(sorted(CATALOG)) | st.just("user.score"))
    measured = CATALOG[metric].unit if metric in CATALOG else ""
    unit = draw(st.sampled_from(sorted(UNITS[measured]))) if measured in UNITS else ""
    change = draw(st.booleans())
    if change:
        words = (draw(st.sampled_from(["drops", "rises"])), draw(positive), unit, "before", draw(rounds))
    else:
        words = (draw(comparisons), draw(numbers), unit, "limit", 1)
    return Condition(metric, *words, draw(rounds))


relatives = st.builds(
    Condition, st.sampled_from(sorted(CATALOG)), comparisons, positive, st.just(""), st.sampled_from(["own", "cohort"]),
    rounds=rounds,
)  # fmt: skip
findings = st.builds(
    FindingCondition,
    st.none() | st.from_regex(r"[A-Z][A-Z0-9_]{0,30}", fullmatch=True),
    st.none() | st.from_regex(r"[a-z][a-z_]{0,20}", fullmatch=True),
    st.none() | st.sampled_from(SEVERITIES),
    st.floats(0, 1).map(lambda value: value or 0.0),
    rounds,
)


@given(limits() | relatives | findings)
def test_every_condition_survives_its_own_words(condition):
    """Written out and read again, it is the same condition."""
    assert parse(str(condition)) == condition


WORDS = ["accuracy", "<", "0.8", "×", "own", "median", "for", "3", "rounds", "finding", "in", "≥", "%", "GB", "x"]


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_read_or_refused(text):
    """No text ends in anything but a condition or our own error, and what is read is written back the same."""
    try:
        found = parse(text)
    except ConfigError:
        return
    assert parse(str(found)) == found
