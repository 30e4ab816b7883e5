"""Progress: every item passes, and only a terminal sees a bar."""

import io
import sys

import pytest

from helpers.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_passes_the_items_and_is_silent_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), "letters", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_the_label_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress(range(4), "training", 4)) == [0, 1, 2, 3]
    assert "training" in terminal.getvalue()
