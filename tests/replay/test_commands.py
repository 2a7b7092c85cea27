# SPDX-License-Identifier: Apache-2.0
"""The debugger's commands, as they are typed."""

import pytest
from safetensors.torch import load_file

import fedvitals as fv
from fedvitals.errors import ConfigError, FedvitalsError
from fedvitals.replay.debugger.commands import ALIASES, COMMANDS, Interpreter, parse_rounds, split_commands
from support.recorded_run import record


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return record(tmp_path_factory.mktemp("rewound"))


@pytest.fixture
def typed(store):
    """An interpreter; what it would draw is listed."""
    with fv.open_replay("rewound", store) as session:
        interpreter = Interpreter(session, lambda shown, path: interpreter.drawn.append((shown.title, str(path))))
        interpreter.drawn = []
        yield interpreter


def test_a_whole_session_as_it_is_typed(typed):
    place = {}
    for line in ("goto 2", "into c4", "step", "step 3", "step back", "s back 2", "out", "next", "back", "goto round 4"):
        typed.do(line)
        place[line] = (typed.session.round, typed.session.node, typed.session.step_number)
    assert place == {
        "goto 2": (2, None, 0),
        "into c4": (2, "c4", 0),
        "step": (2, "c4", 1),
        "step 3": (2, "c4", 4),
        "step back": (2, "c4", 3),
        "s back 2": (2, "c4", 1),
        "out": (2, None, 0),
        "next": (3, None, 0),
        "back": (2, None, 0),
        "goto round 4": (4, None, 0),
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("rounds", "run again from"),
        ("clients", "update.norm"),
        ("where", "round 0 of 0–5"),
        ("print weight head.weight", "shape 10 × 64"),
        ("print gradient head c1", "gradient of c1, round 0, step 0, head.weight"),
        ("print update c4", "dense1.weight"),
        ("print loss c4", "local step 0 to 11"),
        ("print metric accuracy", "round 0 to 5"),
        ("print batch c1", "share"),
        ("print state", "model"),
        ("diff c4 others", "cosine to mean"),
        ("diff c4 c3", "distance"),
        ("diff round 1 2", "beginnings of rounds 1 and 2"),
        ("findings", "findings up to round 0"),
        ("verify 1-2", "rounds 1–2: proved, to the last bit"),
        ("verify 2 c4", "proved"),
        ("whatif drop c4 rounds 2-3", "what if: drop c4"),
        ("help", "goto 12"),
        ("help diff", "others"),
        ("", ""),
        ("# nothing", ""),
    ],
)
def test_each_command_shows_what_it_promises(typed, line, part):
    assert part in str(typed.do(line))


def test_breakpoints_are_numbered_listed_and_removed(typed):
    assert typed.do("break event client.failed") == "1: break event client.failed"
    assert typed.do("watch accuracy").startswith("2: watch accuracy")
    told = str(typed.do("run"))
    assert "Breakpoint 1, round 3" in told
    assert "Watchpoint 2, round 1" in told
    assert typed.session.round == 3
    assert "2: watch" in typed.do("break")
    typed.do("delete 2")
    assert "2: watch" not in typed.do("break")
    assert "Nothing was hit" in str(typed.do("run"))
    typed.do("delete all")
    assert "No breakpoints" in typed.do("break")


def test_an_apostrophe_is_no_quotation_mark(typed):
    assert typed.do("break update.norm of c4 < 0.9 × the cohort's median").endswith("the others' median")


@pytest.mark.parametrize(
    ("line", "taught"),
    [
        ("prnt weight", "Did you mean 'print'"),
        ("goto", "goto 12"),
        ("goto here", "got 'here'"),
        ("goto 77", "It has: 0–5"),
        ("into", "into c7"),
        ("into c77", "Unknown client"),
        ("step", "into c7"),
        ("rounds 3", "stands alone"),
        ("print", "Print what"),
        ("diff c1", "diff c7 others"),
        ("diff round 1 77", "not on the tape"),
        ("verify 1-x", "3-9"),
        ("whatif", "whatif drop c7"),
        ("whatif fly", "Examples: drop c7"),
        ("fork", "fork drop c7"),
        ("bisect 3", "bisect 8 20"),
        ("export", "Export what"),
        ("delete 9", "There are: none"),
        ("break accuracy", "accuracy"),
        ("run until", "no breakpoint yet"),
        ('print "weight', "quotation mark"),
        ("help goo", "Did you mean 'goto'"),
        ("plot", "Plot what"),
    ],
)
def test_a_wrong_command_teaches(typed, line, taught):
    with pytest.raises(FedvitalsError) as told:
        typed.do(line)
    assert taught in str(told.value)


def test_whatever_is_shown_can_be_plotted(typed):
    for line in ("plot loss c4 loss.png", "plot diff c4 others", "plot findings f.svg", "print update c1", "plot"):
        typed.do(line)
    assert [title for title, _ in typed.drawn] == [
        "loss of c4, round 0",
        "update of c4 and of the other clients, round 0",
        "findings up to round 0",
        "update of c1, round 0",
    ]
    assert [path for _, path in typed.drawn] == [
        "loss.png",
        "update-of-c4-and-of-the-other-clients--round-0.png",
        "f.svg",
        "update-of-c1--round-0.png",
    ]
    with pytest.raises(ConfigError, match="nothing here that draws"):
        Interpreter(typed.session).do("plot loss c4")


def test_tab_offers_what_may_come_next(typed):
    assert typed.complete("fi", "fi") == ["findings"]
    assert typed.complete("", "into ") == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert typed.complete("gr", "print gr") == ["gradient"]
    assert typed.complete("hea", "print gradient hea") == ["head.weight", "head.bias"]
    assert "update.norm" in typed.complete("upd", "print metric upd")
    assert typed.complete("", "goto ")[:2] == ["0", "1"]
    assert "others" in typed.complete("o", "diff o")
    assert typed.complete("x", "nonsense x") == []
    assert typed.complete("ro", "plot ro") == ["rounds"]


def test_commands_are_split_at_semicolons_outside_quotes():
    assert split_commands("goto 12; into c7") == ["goto 12", "into c7"]
    assert split_commands('whatif "drop c4; clip 1.5" ;; where # and so on') == ['whatif "drop c4; clip 1.5"', "where"]
    assert split_commands("  ") == []
    assert (parse_rounds("3-9"), parse_rounds("12"), parse_rounds("3–4")) == ((3, 9), (12, 12), (3, 4))


def test_every_command_has_help_and_every_short_name_a_command(typed):
    for name, command in COMMANDS.items():
        assert command.usage.startswith(name)
        assert command.help.endswith(".")
        assert command.help in str(typed.do(f"help {name}"))
    assert set(ALIASES.values()) <= set(COMMANDS)


def test_several_changes_are_one_what_if(typed):
    assert split_commands("goto 2; whatif drop c4; clip 1.5 rounds 2-3; where") == [
        "goto 2",
        "whatif drop c4; clip 1.5 rounds 2-3",
        "where",
    ]
    shown = typed.do(split_commands("whatif drop c4; clip 1.5 rounds 2-3")[0])
    assert shown.title == "what if: drop c4; clip 1.5"
    assert [row[0] for row in shown.rows] == [2, 3]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("verify 3-1", "lies before the first"),
        ("verify c99", "Unknown client 'c99'"),
        ("fork drop c4 rounds 2-3", "goto 2"),
        ("goto", "got nothing after it"),
        ("plot loss c4 loss.jpg", "ends in .png"),
        ("export update c99 u.safetensors", "Unknown layer or client 'c99'"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(typed, line, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    typed.do("into c4")  # whose update is not exported in place of another's
    with pytest.raises(ConfigError) as told:
        typed.do(line)
    assert part in str(told.value)
    assert [*tmp_path.iterdir()] == []


def test_a_picture_that_cannot_be_written_ends_no_session(store, tmp_path):
    def draw(_, path):
        path.write_text("picture")

    with fv.open_replay("rewound", store) as session, pytest.raises(ConfigError, match="cannot be written"):
        Interpreter(session, draw).do(f"plot loss c4 {tmp_path}/nowhere/loss.png")


def test_two_numbers_are_rounds_and_tables_are_exported(typed, tmp_path):
    assert typed.do("diff 1 2").title == typed.do("diff round 1 2").title
    typed.do(f"export diff c4 others {tmp_path}/diff.csv")
    assert (tmp_path / "diff.csv").read_text().startswith("layer,norm c4,")
    typed.do(f"export update c4 head {tmp_path}/head.safetensors")
    assert {*load_file(tmp_path / "head.safetensors")} == {"head.weight", "head.bias"}


def test_help_has_examples_of_what_can_be_said():
    told = {name: str(COMMANDS["help"].does(None, [name])) for name in ("break", "whatif")}
    assert "accuracy drops by 3 points" in told["break"]
    assert "aggregator median" in told["whatif"]
