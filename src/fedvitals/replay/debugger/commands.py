# SPDX-License-Identifier: Apache-2.0
"""The debugger's commands: text in, output out. The same at a prompt, in a script, and in tests."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedvitals.errors import ConfigError, unknown
from fedvitals.replay.debugger import conditions, result_output
from fedvitals.replay.debugger.debugger_output import DebuggerOutput, table_output, text_output
from fedvitals.replay.debugger.exporting import TENSORS
from fedvitals.replay.debugger.printing import NOUNS
from fedvitals.replay.debugger.session import Session

CommandOutput = DebuggerOutput | str
PICTURES, NO_PICTURES = (".png", ".svg", ".pdf", ".html"), (".jpg", ".jpeg", ".gif", ".webp", ".eps")
CHANGE_COMMANDS = ("whatif", "fork")
CHANGE_WORDS = ("drop", "without", "learning_rate", "learning", "client_rate", "client", "server_rate", "server",
           "aggregator", "clip", "weight", "no", "nothing")  # with what a change begins; none is a command  # fmt: skip
DrawFunction = Callable[[DebuggerOutput, Path], object]


@dataclass(frozen=True, slots=True)
class DebuggerCommand:
    """One command. `does` gets the words after the name; `offers`: what completion may suggest, by kind."""

    usage: str
    help: str
    does: Callable[[Interpreter, list[str]], CommandOutput]
    offers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the command's name, the first word of its usage."""
        return self.usage.split()[0].rstrip(",")


class Interpreter:
    """Executes commands on a session. `draw` makes a picture of an output; without it, `plot` fails."""

    def __init__(self, session: Session, draw: DrawFunction | None = None) -> None:
        self.session, self.draw = session, draw

    def do(self, line: str) -> CommandOutput:
        """Execute one command and return its output; an empty line, or one that begins with #, does nothing."""
        words = _tokens(line)
        if not words:
            return ""
        name, rest = words[0].lower(), words[1:]
        command = COMMANDS.get(ALIASES.get(name, name))
        if command is None:
            raise ConfigError(unknown("command", name, COMMANDS) + " `help` says what each does.")
        return command.does(self, rest)

    def complete(self, text: str, line: str) -> list[str]:
        """Return the completions of the last word."""
        before = line[: len(line) - len(text)].split() if text else line.split()
        if not before:
            return sorted(name for name in COMMANDS if name.startswith(text))
        command = COMMANDS.get(ALIASES.get(before[0], before[0]))
        if command is None:
            return []
        offered = [word for kind in command.offers for word in self._offered(kind, before)]
        return [word for word in dict.fromkeys(offered) if word.startswith(text)]

    def _offered(self, kind: str, before: Sequence[str]) -> list[str]:
        session, first = self.session, len(before) == 1
        printing = before[0] in ("print", "plot", "export", "p", "show")
        offered: dict[str, Callable[[], Iterable[str]]] = {
            "nouns": lambda: NOUNS if first else (),
            "nodes": lambda: () if printing and first else session.nodes,
            "layers": lambda: () if first else session.layers,
            "metrics": lambda: session.metric_names() if before[1:2] == ["metric"] else (),
            "numbers": lambda: map(str, session.tape.rounds),
            "commands": lambda: COMMANDS,
        }
        return [*offered[kind]()] if kind in offered else [kind] if first else []


def _tokens(line: str, punctuation: str = "") -> list[str]:
    """Return the words of a line; text in double quotes is one word. Apostrophes are ordinary characters."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=punctuation)
    lexer.whitespace_split, lexer.commenters, lexer.quotes, lexer.escape = True, "#", '"', ""
    try:
        return [*lexer]
    except ValueError:
        raise ConfigError(f"There is a quotation mark without its other half in: {line}") from None


def split_commands(text: str) -> list[str]:
    """Return the commands of a line: «goto 12; into c7». Inside double quotes «;» does not separate."""
    parts: list[list[str]] = [[]]
    for token in _tokens(text, ";"):
        if set(token) == {";"}:
            parts.append([])
        else:
            parts[-1].append(f'"{token}"' if ";" in token or " " in token else token)
    commands: list[str] = []
    for words in filter(None, parts):
        if commands and commands[-1].partition(" ")[0] in CHANGE_COMMANDS and words[0] in CHANGE_WORDS:
            commands[-1] += f"; {' '.join(words)}"  # «whatif drop c7; clip 1.5» is one what-if
        else:
            commands.append(" ".join(words))
    return commands


def _session_method(name: str) -> Callable[[Interpreter, list[str]], CommandOutput]:
    """Return a command that calls a method of the session without arguments."""

    def does(interpreter: Interpreter, words: list[str]) -> CommandOutput:
        if words:
            raise ConfigError(f"'{name}' stands alone; got '{' '.join(words)}' after it.")
        output: DebuggerOutput = getattr(interpreter.session, name)()
        return output

    return does


def _number(words: Sequence[str], usage: str) -> int:
    if len(words) == 1:
        try:
            return int(words[0])
        except ValueError:
            pass
    raise ConfigError(f"The command is  {usage}; got {_got(words)}.")


def _got(words: Sequence[str]) -> str:
    return f"'{' '.join(words)}'" if words else "nothing after it"


def _goto(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    words = words[1:] if words[:1] == ["round"] else words
    return interpreter.session.goto(_number(words, "goto 12"))


def _into(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    if len(words) != 1:
        raise ConfigError(f"Into which client?  into c7. Here are: {', '.join(interpreter.session.nodes)}.")
    return interpreter.session.into(words[0])


def _step(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    sign = 1
    if words[:1] in (["back"], ["in"], ["out"]):
        if words[0] == "out":
            return interpreter.session.out()
        sign = -1 if words[0] == "back" else 1
        words = words[1:]
    return interpreter.session.step(sign * (_number(words, "step 5, step back") if words else 1))


def _plot(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    """Draw what is named, else what was shown last; into a file, if one is named."""
    session = interpreter.session
    path = Path(words.pop()) if words and words[-1].endswith(PICTURES) else None
    if words and words[-1].endswith(NO_PICTURES):
        raise ConfigError(f"A picture is a file that ends in {', '.join(PICTURES)}; got '{words[-1]}'.")
    if not words and session.last is None:
        raise ConfigError("Plot what? As  print:  plot loss c7, plot gradient conv1 gradient.png.")
    output = _shown_by(interpreter, words) if words else session.last
    assert output is not None  # noqa: S101 - asked above
    if interpreter.draw is None:
        raise ConfigError("There is nothing here that draws: `fedvitals replay` has, and fv.plot in Python.")
    if path is None:
        stem = "".join(c if c.isalnum() else "-" for c in output.title.lower()).strip("-")
        path = Path(f"{stem[:60]}.png")
    try:
        interpreter.draw(output, path)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror or error}.") from error
    return f"{path}: {output.title}"


def _shown_by(interpreter: Interpreter, words: list[str]) -> DebuggerOutput:
    if words[0] in TABLE_COMMANDS:
        output = COMMANDS[words[0]].does(interpreter, words[1:])
        assert isinstance(output, DebuggerOutput)  # noqa: S101 - these all give one
        return output
    return interpreter.session.show(*words)


def _diff(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    session = interpreter.session
    if len(words) == 2 and all(word.isdecimal() and word not in session.nodes for word in words):
        words = ["round", *words]
    if words[:1] in (["round"], ["rounds"]) and len(words) == 3:
        return session.diff(_number(words[1:2], "diff round 11 12"), _number(words[2:], "diff round 11 12"))
    if len(words) == 2:
        return session.diff(*words)
    if len(words) == 1 and session.node is not None:
        return session.diff(session.node, words[0])
    raise ConfigError(f"The command is  diff c7 others, diff c7 c3, or diff round 11 12; got {_got(words)}.")


def _break(interpreter: Interpreter, words: list[str], *, watch: bool = False) -> CommandOutput:
    """Add a breakpoint, or a watchpoint; without words, list them all."""
    session, points = interpreter.session, interpreter.session.breakpoints
    if not words:
        return "\n".join(map(str, points)) or "No breakpoints. For example:  break any NaN."
    number = (session.watch if watch else session.break_)(" ".join(words))
    return next(str(point) for point in points if point.number == number)


def _delete(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    points = interpreter.session.breakpoints
    if words in ([], ["all"]):
        points.clear()
        return "No breakpoints any more."
    points.remove(_number(words, "delete 2"))
    return f"{words[0]} is gone."


def _run(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    words = words[1:] if words[:1] == ["until"] else words
    session = interpreter.session
    hit = session.run_until(" ".join(words) or None)
    seen = [str(line) for line in session.watch_hits]
    if hit is None:
        seen.append("Nothing was hit up to the last round.")
    elif hit.number:
        seen.append(str(hit))
    else:  # a sentence; metric names («update.norm») keep their spelling
        first = hit.reason if "." in hit.reason.partition(" ")[0] else hit.reason[:1].upper() + hit.reason[1:]
        seen.append(first.rstrip(".") + ".")
    here = session.where()
    return text_output(here.title, "\n".join([*(f"  {line}" for line in seen), here.text]), here.note)


def _verify(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    """Verify everything, one round, a range of rounds, or one client: verify, verify 12, verify 3-9 c7."""
    first = last = node = None
    for word in words:
        if word in interpreter.session.nodes:
            node = word
        elif word[:1].isdecimal():
            first, last = parse_rounds(word)
        elif word not in ("round", "rounds"):
            raise ConfigError(
                unknown("client", word, interpreter.session.nodes) + " Rounds are  verify 12, verify 3-9."
            )
    return result_output.show_proof(interpreter.session.verify(first, last, node=node), node)


def parse_rounds(text: str) -> tuple[int, int]:
    """Return first and last round of «3-9» or «12»."""
    begin, dash, end = text.replace("–", "-").partition("-")
    try:
        first, last = int(begin), int(end if dash else begin)
    except ValueError:
        raise ConfigError(f"Rounds are a number or two: 12, 3-9; got '{text}'.") from None
    if first > last:
        raise ConfigError(f"The last round, {last}, lies before the first, {first}: write {last}-{first}.")
    return first, last


def _whatif(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    first, last, rest = _split_rounds(words)
    if not rest:
        raise ConfigError("What if what?  whatif drop c7, whatif aggregator median, whatif clip 1.5 rounds 5-9.")
    return interpreter.session.kept(result_output.show_whatif(interpreter.session.whatif(rest, first=first, last=last)))


def _fork(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    first, last, rest = _split_rounds(words)
    if not rest:
        raise ConfigError("Fork with which change?  fork drop c7, fork learning_rate / 10, fork nothing.")
    if first not in (None, interpreter.session.round):
        here = interpreter.session.round
        raise ConfigError(f"A fork begins where the session is, at round {here}; got {first}:  goto {first}  first.")
    return interpreter.session.kept(result_output.show_fork(interpreter.session.fork(rest, until=last)))


def _split_rounds(words: list[str]) -> tuple[int | None, int | None, str]:
    if len(words) >= 2 and words[-2] in ("round", "rounds"):
        return *parse_rounds(words[-1]), " ".join(words[:-2])
    return None, None, " ".join(words)


def _bisect(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    if len(words) < 2:
        raise ConfigError("The command is  bisect 8 20: a round that was still good, and one that was not.")
    good, bad = (_number([word], "bisect 8 20") for word in words[:2])
    until = " ".join(words[3:] if words[2:3] == ["until"] else words[2:])
    return interpreter.session.kept(result_output.show_bisect(interpreter.session.bisect(good, bad, until or None)))


def _export(interpreter: Interpreter, words: list[str]) -> CommandOutput:
    if not words:
        raise ConfigError(
            "Export what, and whereto?  export state s.safetensors, export update c7 u.csv, export t.json."
        )
    if words[0] in TABLE_COMMANDS and not words[-1].endswith(TENSORS):
        _shown_by(interpreter, words[:-1])
        words = words[-1:]  # what was shown last is this now
    path = interpreter.session.export(words[-1], *words[:-1])
    return f"{path}: {path.stat().st_size} bytes"


def _help(_: Interpreter, words: list[str]) -> CommandOutput:
    if not words:
        rows = [(command.usage, command.help) for command in COMMANDS.values()]
        return table_output("commands", ("command", "what it does"), rows, "`help print`: one of them. Tab completes.")
    name = ALIASES.get(words[0], words[0])
    if name not in COMMANDS:
        raise ConfigError(unknown("command", name, COMMANDS))
    command = COMMANDS[name]
    short = [alias for alias, meant in ALIASES.items() if meant == name]
    notes = [f"Also: {', '.join(short)}."] if short else []
    if name in ("break", "run"):
        notes.append(f"Conditions: {', '.join(conditions.EXAMPLES)}; `and` joins them.")
    if name in CHANGE_COMMANDS:
        from fedvitals.replay.counterfactual.change import EXAMPLES  # noqa: PLC0415 - it loads the lab

        notes.append(f"Changes: {', '.join(EXAMPLES)}; several with «;».")
    return text_output(command.usage, f"  {command.help}", "\n".join(notes))


_COMMANDS = (
    DebuggerCommand("rounds", "The rounds on the tape, and how each can be replayed.", _session_method("rounds")),
    DebuggerCommand("clients", "Who took part in this round, and what came of it.", _session_method("clients")),
    DebuggerCommand("goto 12", "To the beginning of a round.", _goto, ("numbers",)),
    DebuggerCommand("next", "To the next round.", _session_method("next")),
    DebuggerCommand("back", "To the round before.", _session_method("back")),
    DebuggerCommand("into c7", "Into a client's local training: run again, step by step.", _into, ("nodes",)),
    DebuggerCommand("step, step 5, step back", "On, or back, in a client's local training.", _step, ("back",)),
    DebuggerCommand("out", "Out of the client, back to its round.", _session_method("out")),
    DebuggerCommand("where", "Where the session is.", _session_method("where")),
    DebuggerCommand(
        "print gradient conv1, print update c7",
        f"Show one of {', '.join(NOUNS)}: of a layer, a client.",
        lambda interpreter, words: interpreter.session.show(*words),
        ("nouns", "nodes", "layers", "metrics"),
    ),
    DebuggerCommand(
        "plot loss c7 loss.png, plot diff c7 others",
        "The same as a picture; alone: what was shown last.",
        _plot,
        ("nouns", "nodes", "layers", "metrics", *("rounds", "clients", "diff", "findings")),
    ),
    DebuggerCommand(
        "diff c7 others, diff c7 c3, diff round 11 12",
        "Two clients' updates, or two rounds' models.",
        _diff,
        ("nodes", "others", "round"),
    ),
    DebuggerCommand("findings", "What had been found wrong by the end of this round.", _session_method("findings")),
    DebuggerCommand("break any NaN", "Stop `run` where a condition holds; alone: list them.", _break),
    DebuggerCommand(
        "watch update.norm of c7", "Tell when a value changes while `run` goes on.", partial(_break, watch=True)
    ),
    DebuggerCommand("delete 2, delete all", "Remove a breakpoint or watchpoint.", _delete),
    DebuggerCommand(
        "run, run until accuracy < 0.5", "On to the next breakpoint, or to where a condition holds.", _run, ("until",)
    ),
    DebuggerCommand(
        "pause",
        "Of a run that is still running: hold it after its round; `run` lets it go on.",
        _session_method("pause"),
    ),
    DebuggerCommand(
        "whatif drop c7, whatif clip 1.5 rounds 5-9",
        "Aggregate again with a change; nobody trains.",
        _whatif,
        ("drop", "aggregator", "clip", "weight", "learning_rate", "server_rate", "nodes"),
    ),
    DebuggerCommand(
        "fork drop c7, fork no faults",
        "Truly run on from here with a change, as a new run.",
        _fork,
        ("drop", "aggregator", "clip", "weight", "learning_rate", "server_rate", "no", "nodes"),
    ),
    DebuggerCommand("bisect 8 20", "The first bad round, and whose updates made it so.", _bisect, ("numbers",)),
    DebuggerCommand(
        "verify, verify 3-9, verify 12 c7",
        "Run rounds again, and check that all bits are the same.",
        _verify,
        ("numbers", "nodes"),
    ),
    DebuggerCommand(
        "export update c7 u.safetensors",
        "A state, update or table to .safetensors, .csv or .json.",
        _export,
        ("nouns", "nodes", "layers", "table"),
    ),
    DebuggerCommand("help, help print", "This list, or one command.", _help, ("commands",)),
)
COMMANDS: Mapping[str, DebuggerCommand] = {command.name: command for command in _COMMANDS}

TABLE_COMMANDS = ("rounds", "clients", "diff", "findings", "whatif")  # what `plot` takes besides the nouns

ALIASES: Mapping[str, str] = {
    "p": "print", "n": "next", "b": "break", "s": "step", "w": "where", "ls": "clients", "bt": "where", "up": "out",
    "show": "print", "prev": "back", "previous": "back", "continue": "run", "c": "run", "finish": "out", "?": "help",
}  # fmt: skip
