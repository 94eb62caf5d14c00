"""`halteres groups`: what is on a trajectory server, seen, written to a file, posted from one. All
ours to choose.
"""

from __future__ import annotations

import gzip
import http.server
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halteres.cli.groups.page import PageFile
from halteres.cli.groups.transfer import Imported, import_lines
from halteres.cli.groups.view import ListedGroup, Selection, Terminal, view
from halteres.cli.main import main
from halteres.clients.retries import Retries
from halteres.clients.trajectories.groups import Reader
from halteres.models import TINY, builtin_path
from halteres.tokenizer import load_tokenizer
from halteres.trajectories.options import Options

from .queues import ENV, TRAINER, Queue, answering, group

Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """A server with nothing on it."""
    with answering(tmp_path / "queue.sqlite") as running:
        yield running


@pytest.fixture
def groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Program:
    """`halteres groups ...` in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["halteres", "groups", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def spoken(context: str, *answers: str, **extra: Any) -> dict[str, Any]:
    """A group of the built-in model's tokens; the first answer scores best."""
    folder = builtin_path(TINY)
    assert folder is not None
    tokenizer = load_tokenizer(str(folder))
    prompt, sampled = tokenizer.encode(context), [tokenizer.encode(answer) for answer in answers]
    return {
        "tokens": [[*prompt, *answer] for answer in sampled],
        "masks": [[*[-100] * len(prompt), *answer] for answer in sampled],
        "scores": [float(-at) for at in range(len(answers))],
        **extra,
    }


KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params"),
    *("inference_logprobs", "overrides", "group_overrides", "images", "env_id"),
    *("distill_token_ids", "distill_logprobs"),
}
CHAT = [
    [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": city}]
    for city in "PL"
]
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\x07\u202e"


# -- view


def test_a_block_tells_whose_a_group_is_its_scores_and_its_best_and_worst_text(
    queue: Queue, groups: Program
) -> None:
    env_id = queue.begin()
    queue.send(spoken("What is 3 + 4? ", "It is 7.", "It is 8.", env_id=env_id, policy_version=3))
    code, out, err = groups("view", "--url", queue.url, "--once", "--tokenizer", TINY)
    first, figures, *rest = out.splitlines()
    assert (code, err) == (0, "")
    assert re.fullmatch(r"group 1  sums_0 \(0\)  queued  \d\d:\d\d:\d\d  version 3", first)
    assert "scores 0 -1  mean -0.5" in figures and "sampled" in figures
    assert rest == [
        "  best: sequence 0, score 0",
        "  ┊ What is 3 + 4?",
        "  ┃ It is 7.",
        "  worst: sequence 1, score -1",
        "  ┊ What is 3 + 4?",
        "  ┃ It is 8.",
        "",
    ]


def test_context_is_quiet_and_sampled_text_is_not(queue: Queue) -> None:
    queue.send(group())
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard", width=80)
    reader = Reader(queue.url)
    view(reader, Selection(), Terminal(console, None, full=False))
    reader.close()
    context, sampled = (
        next(line for line in output.getvalue().splitlines() if bar in line) for bar in "┊┃"
    )
    assert re.sub(r"\x1b\[[\d;]*m", "·", context) == "·  ┊ ··7·" and context.count("\x1b[2m") == 2
    assert "\x1b[2m" not in sampled and "\x1b[1;32m" in sampled


def test_without_a_tokenizer_messages_are_shown_else_shortened_ids(
    queue: Queue, groups: Program
) -> None:
    queue.send(
        group(messages=CHAT), {"tokens": [[*range(90)]], "masks": [[*range(90)]], "scores": [1]}
    )
    _, out, _ = groups("view", "--url", queue.url, "--once")
    assert "  ┊ user: Capital of France?\n  ┃ assistant: L\n" in out
    assert "0 1 2 3" in out and "…" in out and " 45 " not in out


def test_what_a_model_wrote_cannot_command_the_terminal(queue: Queue, groups: Program) -> None:
    chat = [[{"role": "assistant\x1b[2J", "content": HOSTILE}]] * 2
    queue.send(spoken("a", HOSTILE, "\r\n\x9b31m\x7fb"), group(messages=chat))
    for tokenizer in ((), ("--tokenizer", TINY)):
        _, out, _ = groups("view", "--url", queue.url, "--once", "--full", *tokenizer)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
        assert "<U+001B>[2J" in out and "<U+202E>" in out


def test_an_environment_s_name_cannot_break_its_line(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    queue.begin()
    env_id = queue.ask("/register-env", {**ENV, "desired_name": "su\nms\t\x1b[2J\r\nx"})["env_id"]
    queue.send(group(env_id=env_id))
    _, out, _ = groups("view", "--url", queue.url, "--once")
    assert out.splitlines()[0].startswith(
        "group 1  su<U+000A>ms<U+0009><U+001B>[2J<U+000A>x_0 (1)  queued  "
    )
    file = tmp_path / "p.html"
    groups("view", "--url", queue.url, "--once", "--html", str(file))
    assert "su<U+000A>ms<U+0009>" in data_of(file)["groups"][0]["task"]


def test_numbers_of_any_size_are_short(queue: Queue, groups: Program, tmp_path: Path) -> None:
    """Also their mean, where their sum or their distance is no float any more."""
    huge = [[1.5e308] * 3] * 2
    queue.send(
        group(scores=[1e308, 1.1e308], advantages=huge), group(scores=[-1e308, -1e308]), group()
    )
    file = tmp_path / "p.html"
    for arguments in ((), ("--html", str(file))):
        code, _, err = groups("view", "--url", queue.url, "--once", *arguments)
        assert code == 0, err
    _, shown, _ = groups("view", "--url", queue.url, "--once")
    assert "scores 1e+308 1.1e+308  mean 1.05e+308" in shown
    assert not re.search(r"\d{20}|\b(nan|inf)\b", shown)
    held = data_of(file)
    last = held["groups"][-1]
    assert (last["mean"], last["spread"]) == (1.05e308, None)
    assert last["rollouts"][0]["advantage"] == 1.5e308
    assert held["facts"]["mean score"] == pytest.approx(1.667e306, rel=1e-3)


def test_set_aside_groups_tell_why_also_where_their_arrays_do_not_fit(
    queue: Queue, groups: Program
) -> None:
    crooked = group()
    crooked["masks"][1] = [-100]
    queue.send(
        crooked, json.dumps({**group(), "scores": [1.0, float("nan")]}).encode(), group(mark=2**40)
    )
    _, out, _ = groups(
        "view", "--url", queue.url, "--once", "--tokenizer", TINY, "--place", "set_aside", "--full"
    )
    assert "masks[1] is 1 long, tokens[1] 3. (lengths)" in out and "sequence 1" in out
    assert (
        "scores[1] is not a finite number. (not_finite)\n  2 sequences; no tokens are kept of them"
        in out
    )
    _, out, _ = groups(
        "view", "--url", queue.url, "--once", "--tokenizer", TINY, "--place", "queued"
    )
    assert f"⟨{2**40}⟩" in out


def test_one_of_a_kind_is_no_plural(queue: Queue, groups: Program, tmp_path: Path) -> None:
    one = {"tokens": [[7]], "masks": [[7]], "scores": [1.0]}
    queue.send(json.dumps({**one, "scores": [float("nan")]}).encode(), one)
    _, out, _ = groups("view", "--url", queue.url, "--once")
    assert "  1 sequence; no tokens are kept of it\n" in out and "  1 token, 1 sampled\n" in out
    groups("view", "--url", queue.url, "--once", "--limit", "1", "--html", str(tmp_path / "p.html"))
    page = (tmp_path / "p.html").read_text()
    assert "<title>1 group</title>" in page
    assert "1 token, 1 sampled" in data_of(tmp_path / "p.html")["groups"][0]["facts"]


def test_limit_place_and_environment_choose_the_newest_of_some(
    queue: Queue, groups: Program
) -> None:
    env_id = queue.begin()
    queue.send(*(group(env_id=env_id) for _ in range(3)), group())
    shown = {
        ("--limit", "2"): [3, 4],
        ("--env", "sums"): [1, 2, 3],
        ("--env", str(env_id), "--limit", "1"): [3],
        ("--place", "delivered", "--place", "out"): [],
    }
    for arguments, ids in shown.items():
        _, out, err = groups("view", "--url", queue.url, "--once", *arguments)
        assert [int(found) for found in re.findall(r"^group (\d+)", out, re.MULTILINE)] == ids
        assert ("No such group is there." in err) == (not ids)


class Seen:
    """A face that notes what it is shown, then lets the next thing happen at each wait; Ctrl-C
    after the last.
    """

    def __init__(self, *happenings: Callable[[], object]) -> None:
        self.ids: list[int] = []
        self._happenings = iter(happenings)

    def show(self, group: ListedGroup) -> None:
        self.ids.append(group.info.id)

    def rest(self, reader: Reader) -> None:
        pass

    def wait(self, pause_s: float) -> None:
        happening = next(self._happenings, None)
        if happening is None:
            raise KeyboardInterrupt
        happening()


def followed(reader: Reader, seen: Seen, **wanted: Any) -> list[int]:
    """Ids in the order in which they were shown until Ctrl-C."""
    with pytest.raises(KeyboardInterrupt):
        view(reader, Selection(follow=True, **wanted), seen, seen.wait)
    reader.close()
    return seen.ids


def test_following_shows_each_group_once_and_changes_nothing(queue: Queue) -> None:
    queue.send(*(group() for _ in range(3)))
    seen = Seen(
        lambda: queue.send(group(), group()),
        lambda: None,
        lambda: queue.send(group()),
        queue.asked.clear,
    )
    before = queue.groups()
    assert followed(Reader(queue.url), seen, limit=2) == [2, 3, 4, 5, 6]
    assert queue.groups()[:3] == before
    assert queue.asked and all(re.match(r"GET /v1/", asked) for asked in queue.asked)


def test_following_one_place_shows_groups_in_the_order_in_which_they_come_there(
    queue: Queue,
) -> None:
    queue.begin()

    def leased() -> int:
        return queue.ask("/batch?lease=60")["batch_id"]

    def settle(batch: int) -> None:
        queue.ask(f"/v1/batches/{batch}/ack", b"")

    queue.send(*(group() for _ in range(4)))
    first, second = leased(), leased()
    seen = Seen(lambda: settle(second), lambda: None, lambda: settle(first))
    assert followed(Reader(queue.url), seen, places=("delivered",)) == [3, 4, 1, 2]


def test_following_goes_on_when_the_server_comes_back(queue: Queue) -> None:
    queue.send(group())
    seen = Seen(queue.end, lambda: None, queue.start, lambda: queue.send(group()))
    assert followed(Reader(queue.url, Retries.for_seconds(0)), seen) == [1, 2]


def data_of(file: Path) -> dict[str, Any]:
    """What a page shows: the browser's test is in tests/dashboard."""
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


def test_the_page_needs_nothing_and_no_text_in_it_is_markup(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    hostile = [
        [{"role": f"<b onclick='x'>{HOSTILE}", "content": [{"type": "text", "text": HOSTILE}]}]
    ] * 2
    queue.send(spoken(HOSTILE, HOSTILE, "ordinary"), group(messages=hostile))
    file = tmp_path / "p.html"
    for tokenizer in ((), ("--tokenizer", TINY)):
        code, out, err = groups(
            "view", "--url", queue.url, "--once", "--html", str(file), *tokenizer
        )
        page = file.read_text()
        assert (code, out, "p.html" in err) == (0, "", True)
        held = page.split('id="data">')[1].split("</script>")[0]
        assert "<" not in held and "alert(1)" in held and "U+202E" in held
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
        assert page.count("</script>") == 2 and "default-src 'none'; script-src 'sha256-" in page


def tinted(file: Path) -> list[list[tuple[str, float]]]:
    """Of each sequence of a page's first group, the tokens that the policy found unlikely."""
    found: list[list[tuple[str, float]]] = []
    for rollout in data_of(file)["groups"][0]["rollouts"]:
        (part,) = [part for part in rollout["parts"] if part["sampled"]]
        ends = list(itertools.accumulate(part.get("lengths", ())))
        texts = [part["text"][begin:end] for begin, end in itertools.pairwise([0, *ends])]
        tokens = zip(texts, part.get("logprobs", ()), strict=False)
        found.append([(text, logprob) for text, logprob in tokens if logprob < -0.7])
    return found


def test_the_page_tells_advantages_and_tints_what_the_policy_found_unlikely(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    sent = spoken("What is 3 + 4? ", "It is 7.", "é.")
    sampled = [[token != -100 for token in mask] for mask in sent["masks"]]
    sent["advantages"] = [[0.5 * own for own in row] for row in sampled]
    unlikely = [[-0.1] * row.count(True) for row in sampled]
    unlikely[0][0], unlikely[0][-1], unlikely[1][0] = -1.0, -5.0, -3.0
    sent["inference_logprobs"] = [
        [1.0] * row.count(False) + own for row, own in zip(sampled, unlikely, strict=True)
    ]
    queue.send(sent)
    file = tmp_path / "p.html"
    groups("view", "--url", queue.url, "--once", "--html", str(file), "--tokenizer", TINY)
    (first, last), (half,) = tinted(file)
    # the first of the two tokens that make é
    assert (first[1], last, half) == (-1.0, (".", -5.0), ("", -3.0))
    (shown,) = data_of(file)["groups"]
    assert shown["prompt"] == "What is 3 + 4? "
    assert [one["parts"][0]["text"] for one in shown["rollouts"]] == ["It is 7.", "é."]
    assert [one["advantage"] for one in shown["rollouts"]] == [0.5, 0.5]
    groups("view", "--url", queue.url, "--once", "--html", str(file))
    assert tinted(file) == [[], []]


@pytest.mark.parametrize("logprobs", [[], [[-9.0]], [[-9.0] * 3]])
def test_log_probabilities_that_do_not_fit_tint_nothing(
    logprobs: list[list[float]], queue: Queue, groups: Program, tmp_path: Path
) -> None:
    """The server sets such a group aside; it is shown all the same."""
    queue.send(
        spoken("a", "It is 7.", "It is 8.", inference_logprobs=logprobs, advantages=logprobs)
    )
    file = tmp_path / "p.html"
    groups("view", "--url", queue.url, "--once", "--html", str(file), "--tokenizer", TINY)
    assert tinted(file) == [[], []]
    assert all("advantage" not in one for one in data_of(file)["groups"][0]["rollouts"])


def test_a_page_that_follows_shows_where_its_groups_are_by_now(
    queue: Queue, tmp_path: Path
) -> None:
    queue.begin()
    file = tmp_path / "p.html"
    reader, page = Reader(queue.url), PageFile(file, None, source=queue.url, limit=3)
    places: list[list[str]] = []

    def look() -> None:
        places.append([group["state"] for group in data_of(file)["groups"]])

    happenings = Seen(
        lambda: (look(), queue.send(group(), group())), lambda: (look(), queue.ask("/batch")), look
    )
    queue.send(group(), group())
    with pytest.raises(KeyboardInterrupt):
        view(reader, Selection(follow=True, limit=3), page, happenings.wait)
    reader.close()
    assert places == [["queued"] * 2, ["queued"] * 3, ["queued", "queued", "delivered"]]
    assert list(tmp_path.glob(".p*")) == []


def test_a_page_is_said_to_be_there_once_and_only_when_it_is(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    file, said_so = tmp_path / "nowhere" / "p.html", list[bool]()
    code, out, err = groups("view", "--url", queue.url, "--once", "--html", str(file))
    assert (code, out, "open it" in err) == (1, "", False) and f"{file} cannot be written." in err
    file = tmp_path / "p.html"
    reader = Reader(queue.url)
    page = PageFile(
        file, None, source=queue.url, limit=3, written=lambda: said_so.append(file.exists())
    )
    with pytest.raises(KeyboardInterrupt):
        view(
            reader,
            Selection(follow=True, limit=3),
            page,
            Seen(lambda: queue.send(group()), lambda: None).wait,
        )
    reader.close()
    assert said_so == [True]


# -- export


def test_a_line_is_what_the_trainer_gets(queue: Queue, groups: Program, tmp_path: Path) -> None:
    queue.begin()
    queue.send(
        json.dumps(group(mark=1, policy_version=2), indent=2).encode(), group(mark=2, messages=CHAT)
    )
    file, packed = tmp_path / "g.jsonl", tmp_path / "g.jsonl.gz"
    code, out, err = groups("export", str(file), "--url", queue.url)
    assert (code, out, "2 groups" in err) == (0, "", True)
    assert groups("export", str(packed), "--url", queue.url)[0] == 0
    assert gzip.decompress(packed.read_bytes()) == file.read_bytes()
    lines = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert lines == queue.ask("/batch?policy_version=2")["batch"]
    assert [set(line) - {"policy_version"} for line in lines] == [KEYS] * 2


def test_groups_without_tokens_are_left_out_and_counted(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    queue.send(group(), json.dumps({**group(), "scores": [1.0, float("nan")]}).encode())
    _, _, err = groups("export", str(tmp_path / "g.jsonl"), "--url", queue.url)
    assert "1 group, " in err and "1 group left out" in err


def test_a_file_that_cannot_be_written_is_told_and_a_failed_one_is_not_there(
    groups: Program, tmp_path: Path
) -> None:
    file = tmp_path / "nowhere" / "g.jsonl"
    with answering(tmp_path / "q.sqlite") as queue:
        code, _, err = groups("export", str(file), "--url", queue.url)
        assert (code, f"{file} cannot be written. No such file" in err) == (1, True)
    code, _, err = groups("export", str(tmp_path / "g.jsonl"), "--url", queue.url)
    assert code == 1 and f"{queue.url} does not answer. ConnectError" in err
    assert not list(tmp_path.glob("*g.jsonl*"))


@pytest.mark.parametrize("content", [None, b"", b"\x1f\x8b broken"])
def test_an_import_of_which_nothing_was_read_says_only_its_error(
    content: bytes | None, queue: Queue, groups: Program, tmp_path: Path
) -> None:
    file = tmp_path / "g.jsonl.gz"
    if content is not None:
        file.write_bytes(content)
    code, out, err = groups("import", str(file), "--url", queue.url)
    assert (code, out, len(err.splitlines())) == (0 if content == b"" else 1, "", 1), err
    assert ("0 groups posted" in err) == (content == b"") and "Import it again" not in err


# -- import


def test_importing_twice_doubles_nothing(queue: Queue, groups: Program, tmp_path: Path) -> None:
    queue.begin()
    file = tmp_path / "g.jsonl.gz"
    file.write_bytes(
        gzip.compress(
            "".join(json.dumps(group(policy_version=1)) + "\n" for _ in range(20)).encode()
        )
    )
    for _ in range(2):
        code, out, err = groups("import", str(file), "--url", queue.url)
        told = f"{file}: 20 groups posted, 0 bad lines. What was there already counts once.\n"
        assert (code, out, told in err) == (0, "", True), err
        assert len(queue.groups()) == 20
    assert {(told["env_id"], told["policy_version"]) for told in queue.groups()} == {(None, None)}


def test_what_was_exported_can_be_imported_elsewhere(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    env_id = queue.begin()
    queue.send(group(mark=1, env_id=env_id, policy_version=2), group(mark=2, messages=CHAT))
    assert groups("export", str(tmp_path / "g.jsonl"), "--url", queue.url)[0] == 0
    with answering(tmp_path / "other.sqlite") as other:
        other.begin()
        where = ("--url", other.url, "--env", "sums")
        code, _, err = groups("import", str(tmp_path / "g.jsonl"), *where)
        assert (code, "2 groups posted" in err) == (0, True)
        told = other.groups(bodies="true")
    assert [(one["env_id"], one["policy_version"]) for one in told] == [(0, None), (0, None)]
    assert [one["element"]["messages"] for one in told] == [None, CHAT]


def test_lines_of_the_originals_process_are_taken(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    """atroposlib 0.4.0 envs/base.py: what handle_send_to_api writes."""
    absent = dict.fromkeys(
        ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")
    )
    lines = [
        group(**absent, images=None, messages=[]),
        group(
            **absent, messages=[[{"role": "user", "content": "<whole text>", "reward": None}]] * 2
        ),
        {**group(), "scores": [1, 0]},
    ]
    file = tmp_path / "p.jsonl"
    # Every line may be the first of a file that was joined to others.
    file.write_text("\r\n\r\n".join("\ufeff" + json.dumps(line) for line in lines))
    code, _, err = groups("import", str(file), "--url", queue.url)
    assert (code, "3 groups posted, 0 bad lines" in err) == (0, True), err
    elements = [told["element"] for told in queue.groups(bodies="true")]
    assert elements[2]["scores"] == [1.0, 0.0]


def test_bad_lines_are_named_and_the_others_go_on(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    nan = json.dumps({**group(), "scores": [1.0, float("nan")]})
    crooked = group()
    crooked["masks"][1] = [-100]
    texts = [
        "nonsense",
        json.dumps(group()),
        "[1]",
        '{"tokens": [[1]]}',
        '{"tokens":[["x"]],"masks":[[1]],"scores":[1]}',
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join([*texts, nan, json.dumps(crooked)]))
    code, _, err = groups("import", str(file), "--url", queue.url)
    assert code == 1
    told = {
        int(number): why for number, why in re.findall(r"^line (\d+): (.*)$", err, re.MULTILINE)
    }
    assert sorted(told) == [1, 3, 4, 5, 6]
    for number, why in {
        1: "no group in JSON",
        3: "no group in JSON",
        4: "scores",
        5: "tokens.0.0",
        6: "no group in JSON",
    }.items():
        assert why in told[number]
    assert "2 groups posted, 5 bad lines" in err and "more bad" not in err
    assert "1 of them set aside, never to be delivered: masks[1] is 1 long, tokens[1] 3." in err


def test_of_many_bad_lines_the_first_are_named_and_the_others_counted(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("nonsense\n" * 100 + json.dumps(group()) + "\n")
    code, _, err = groups("import", str(file), "--url", queue.url)
    *named, others, summary = err.splitlines()
    assert (code, [line[:6] for line in named]) == (1, [f"line {number}" for number in range(1, 6)])
    assert others == "95 more bad lines."
    assert summary == f"{file}: 1 group posted, 100 bad lines. What was there already counts once."


def test_an_import_does_not_count_what_others_repeat(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    """The server counts repeats of all its clients together, so no share of them is told as this
    file's.
    """
    file, repeating, ended = tmp_path / "p.jsonl", threading.Event(), threading.Event()

    def repeat() -> None:
        while not ended.is_set():
            queue.ask("/scored_data", group(), **{"Idempotency-Key": "of another"})
            repeating.set()

    file.write_text("".join(json.dumps(group(mark=mark)) + "\n" for mark in range(20)))
    other = threading.Thread(target=repeat)
    other.start()
    try:
        assert repeating.wait(10)
        _, _, err = groups("import", str(file), "--url", queue.url)
    finally:
        ended.set()
        other.join()
    assert "20 groups posted, 0 bad lines." in err


def test_groups_that_were_set_aside_are_exported_and_judged_anew_where_they_are_imported(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    queue.begin()
    queue.ask("/register", {**TRAINER, "max_staleness": 1})
    queue.ask("/batch?policy_version=9")
    crooked = group(policy_version=9)
    crooked["masks"][1] = [-100]
    queue.send(group(mark=1, policy_version=2), crooked)
    assert [told["reason"] for told in queue.groups(place="set_aside")] == ["stale", "lengths"]
    assert groups("export", str(tmp_path / "g.jsonl"), "--url", queue.url)[0] == 0
    with answering(tmp_path / "other.sqlite") as other:
        assert groups("import", str(tmp_path / "g.jsonl"), "--url", other.url)[0] == 0
        assert sorted((told["place"], told["reason"]) for told in other.groups()) == sorted(
            [("queued", None), ("set_aside", "lengths")], key=str
        )


async def test_a_server_that_is_away_for_a_while_is_waited_for(
    queue: Queue, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(group(mark=mark)) + "\n" for mark in range(30)))
    queue.end()
    back = threading.Thread(target=queue.start)
    done = Imported()
    back.start()
    with file.open("rb") as stream:
        await import_lines(queue.url, stream, done, lambda line, error: pytest.fail(str(error)))
    back.join()
    assert (done.num_posted, len(queue.groups())) == (30, 30)


def test_an_interrupted_import_is_finished_by_the_next(
    queue: Queue, groups: Program, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl.gz"
    whole = gzip.compress(
        "".join(json.dumps(group(mark=mark)) + "\n" for mark in range(200)).encode()
    )
    file.write_bytes(whole[: len(whole) // 2])
    code, _, err = groups("import", str(file), "--url", queue.url)
    held = len(queue.groups())
    assert (code, "The file is damaged." in err, "Import it again" in err, 0 < held < 200) == (
        1,
        True,
        True,
        True,
    )
    file.write_bytes(whole)
    _, _, err = groups("import", str(file), "--url", queue.url)
    assert "200 groups posted" in err and len(queue.groups()) == 200


# -- what can go wrong


@pytest.mark.parametrize("verb", [("view", "--once"), ("export", "g.jsonl"), ("import", __file__)])
def test_errors_say_what_why_and_next(
    verb: tuple[str, ...], groups: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        stranger({"/": b'{"message": "AtroposLib API"}'}) as original,
        stranger({"/": b"<h1>hello</h1>"}) as other,
    ):
        wrong = {
            "foo": "'foo' is no address of a server. For example http://127.0.0.1:8000.",
            original: "has no list of groups (/v1/groups). It is the original Atropos server",
            other: "is no trajectory server. It answers / with 200. Name one with --url",
        }
        for url, says in wrong.items():
            code, out, err = groups(*verb, "--url", url)
            assert (code, out, says in err) == (1, "", True), err


def test_a_server_may_ask_for_a_token(
    groups: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "abcdefghijklmnopqrstuvwx"
    with answering(
        tmp_path / "q.sqlite", Options(database=str(tmp_path / "q.sqlite"), token=token)
    ) as queue:
        code, _, err = groups("view", "--url", queue.url, "--once")
        assert (code, "HALTERES_TRAJECTORY_TOKEN" in err) == (1, True)
        assert groups("view", "--url", queue.url.replace("//", f"//any:{token}@"), "--once")[0] == 0
        monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", token)
        page = tmp_path / "p.html"
        assert groups("view", "--url", queue.url, "--once", "--html", str(page))[0] == 0
        assert token not in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("view", "--place", "quued"), "Did you mean 'queued'?"),
        (("view", "--env", "smus_0"), "Did you mean 'sums_0'?"),
        (("view", "--tokenizer", "/nowhere"), "holds no tokenizer"),
        (("import", "/nowhere/g.jsonl"), "/nowhere/g.jsonl cannot be read. No such file"),
        (("import", __file__, "--env", "77"), "There is no environment '77'. Known: sums_0."),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: tuple[str, ...], says: str, groups: Program, queue: Queue
) -> None:
    queue.begin()
    code, out, err = groups(*arguments, "--url", queue.url)
    assert (code, out, says in err) == (1, "", True), err


def test_ctrl_c_and_a_reader_that_had_enough_end_quietly(queue: Queue, tmp_path: Path) -> None:
    queue.send(*(group() for _ in range(60)))
    program = [sys.executable, "-c", "from halteres.cli.main import main; main()", "groups"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen([*program, "view", "--follow", "--url", queue.url], **pipes) as viewer,
        subprocess.Popen([*program, "view", "--follow", "--url", queue.url], **pipes) as piped,
    ):
        assert viewer.stdout and piped.stdout
        assert viewer.stdout.readline().startswith(b"group 41")
        viewer.send_signal(signal.SIGINT)
        assert piped.stdout.readline()
        piped.stdout.close()
        queue.send(group())
        errors = (
            viewer.communicate(timeout=10)[1],
            piped.stderr.read() if piped.stderr else b"",
        )
    assert (viewer.returncode, piped.returncode) == (130, 1)
    assert b"Traceback" not in b"".join(errors) and b"BrokenPipe" not in b"".join(errors)


class stranger:
    """A web server of another kind: some paths, 404 for all others."""

    def __init__(self, pages: dict[str, bytes]) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write(page or b"")

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *failure: object) -> None:
        self._server.shutdown()
        self._server.server_close()
