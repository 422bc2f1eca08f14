"""A journal of finished jobs survives anything."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ctxext.errors import ResultsError
from ctxext.evaluation.passkey import PasskeyTrial
from ctxext.measuring.journal import Journal
from ctxext.measuring.provenance import from_json


def test_the_file_of_trials_belongs_to_one_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mine = tmp_path / "keys.trials.jsonl", {"name": "tiny", "sha256": "1"}
    journal = Journal(path)
    journal.claim({"made_by": "ctxext eval passkey", "checkpoint": mine})
    journal.keep({"key": "k0", "reading": "unpatched", "trial": {"loss": 0.1 + 0.2}})
    Journal(path, process=1).keep({"key": "k1", "reading": "yarn x2", "trial": {"loss": 1.0}})
    (tmp_path / "keys.trials.old.jsonl").write_text('{"key": "k9", "trial": {}}\n')
    again = Journal(path)
    again.claim({"made_by": "ctxext eval passkey", "checkpoint": mine})
    trials = {key: line["trial"] for key, line in again.finished().items()}
    assert trials == {"k0": {"loss": 0.1 + 0.2}, "k1": {"loss": 1.0}}
    with pytest.raises(ResultsError, match=r"another checkpoint: tiny \(sha256 1\), and this is other \(sha256 2\)"):
        again.claim({"made_by": "ctxext eval passkey", "checkpoint": {"name": "other", "sha256": "2"}})
    with pytest.raises(ResultsError, match=r"no jobs of `ctxext eval ruler`.*found made_by='ctxext eval passkey'"):
        again.claim({"made_by": "ctxext eval ruler", "checkpoint": mine})

    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ResultsError, match=r"The disk is full\. Finished jobs are kept \(2 of them\)"):
        again.keep({"key": "k2", "reading": "unpatched", "trial": {"loss": 2.0}})
    monkeypatch.undo()
    assert set(Journal(path).finished()) == {"k0", "k1"}
    (tmp_path / "keys.trials.2.jsonl").mkdir()  # which cannot be read, so that nobody can count
    with pytest.raises(ResultsError, match=r"^Cannot use .*: Is a directory\. Finished jobs are kept; make room there"):
        again.finished()


GOOD = {"key": "k0", "reading": "unpatched", "seconds": 1.0, "trial": {"found": [True]}}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (json.dumps(GOOD | {"key": ["k0"]}).encode(), r"holds \['k0'\] as 'key'"),
        (json.dumps(GOOD | {"file": 3}).encode(), "holds 3 as 'file'"),
        (json.dumps({"key": "k0", "seconds": 1.0}).encode(), "lacks the field 'trial'"),
        (json.dumps(GOOD | {"trial": {"length": 9}}).encode(), "lacks the field 'depth'"),
        (json.dumps(GOOD).encode(), "lacks the field 'passes'"),
    ],
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, line: bytes, says: str) -> None:
    path = tmp_path / "keys.trials.jsonl"
    journal = Journal(path)
    journal.claim({"made_by": "ctxext eval passkey"})
    path.write_bytes(path.read_bytes() + line + b"\n")
    place = rf"Line 2 of '.*keys\.trials\.jsonl' is damaged.*{says}.*Delete it and run the same command again"
    with pytest.raises(ResultsError, match=place):
        _used(Journal(path).finished()["k0"], says)


def _used(line: Any, says: str) -> None:
    """Read a line as a race does, or as passkeys do."""
    if "passes" in says:
        line["passes"]
    from_json(PasskeyTrial, line["trial"])


@pytest.mark.parametrize("torn", [1, 12, 13, 40, -1])
def test_a_kill_may_tear_the_line_that_claims_a_journal(tmp_path: Path, torn: int) -> None:
    path, identity = tmp_path / "out.trials.jsonl", {"made_by": "ctxext eval passkey"}
    Journal(path).claim(identity)
    whole = path.read_bytes()
    path.write_bytes(whole[:torn])
    journal = Journal(path)
    journal.claim(identity)
    journal.keep({"key": "k0", "trial": {"loss": 1.0}})
    assert path.read_bytes().startswith(whole)
    assert set(Journal(path).finished()) == {"k0"}


@pytest.mark.parametrize("content", ['{"loss": 1.0}', "notes", "\n", "[]"])
def test_a_file_that_is_no_journal_stays_what_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.trials.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ResultsError, match="holds no jobs of"):
        Journal(path).claim({"made_by": "ctxext eval passkey"})
    assert path.read_text(encoding="utf-8") == content


def test_a_damaged_identity_is_an_error_that_names_it(tmp_path: Path) -> None:
    identity, mine = tmp_path / "comparison.json", {"name": "tiny", "sha256": "1"}
    identity.write_bytes(b'{"made_by": "caf\xe9"}')
    journal = Journal(tmp_path / "cells.jsonl", identity=identity)
    with pytest.raises(ResultsError, match=r"holds no jobs of"):
        journal.claim({"made_by": "ctxext eval compare"})
    identity.write_text(json.dumps({"made_by": "ctxext eval compare", "format": 1, "checkpoint": "tiny"}))
    with pytest.raises(ResultsError, match="another checkpoint"):
        journal.claim({"made_by": "ctxext eval compare", "checkpoint": mine})
