"""How far a run is."""

import io
import sys

import pytest

from bench.progress import Progress


def test_without_a_terminal_lines_are_counted(capsys):
    progress = Progress(terminal=False)
    progress.say("peers: none")
    progress.expect(2)
    progress.say("first")
    progress.done()
    progress.expect(1)
    progress.say("second")
    for _ in range(2):
        progress.done()
    progress.say("after all")
    progress.close()
    assert capsys.readouterr().err == "peers: none\n[1/2] first\n[2/3] second\n[3/3] after all\n"


def test_a_terminal_has_a_bar_and_lines_above_it(monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(terminal=True)
    progress.expect(2)
    progress.done()
    progress.say("a row")
    progress.done()
    progress.close()
    text = stream.getvalue()
    assert "a row\n" in text
    assert "2/2" in text.splitlines()[-1]
    assert "[1/2]" not in text


def test_a_terminal_without_tqdm_has_the_count(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    progress = Progress(terminal=True)
    progress.expect(3)
    progress.say("a row")
    assert capsys.readouterr().err == "[1/3] a row\n"
