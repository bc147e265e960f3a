"""The count of what was encoded under a key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from milkglass.client.key import usage
from milkglass.errors import KeyFileError


def test_counts_add_up_over_commands_side_by_side(tmp_path: Path) -> None:
    key = tmp_path / "my.mgkey"
    assert usage.read(key) == usage.Usage()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: usage.add(key, 1, 10), range(40)))
    assert (usage.read(key).texts, usage.read(key).tokens) == (40, 400)
    assert usage.counts_file(key).stat().st_mode & 0o777 == 0o600


def test_an_audit_is_remembered_and_its_budget_warned_of(tmp_path: Path) -> None:
    key = tmp_path / "my.mgkey"
    usage.add(key, 5, 900)
    usage.record_audit(key, {"same kind of text": {"10 %": 1000, "25 %": 5000}}, 8000)
    assert usage.read(key).passed_thresholds() == []
    usage.add(key, 1, 100)
    assert usage.read(key).passed_thresholds() == [("same kind of text", "10 %", 1000)]
    usage.add(key, 1, 9000)
    assert usage.read(key).passed_thresholds() == [("same kind of text", "25 %", 5000)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"milkglass_usage": 2}', '{"milkglass_usage": 1, "secret": 3}'])
def test_a_damaged_count_is_said_to_be_one(tmp_path: Path, content: str) -> None:
    key = tmp_path / "my.mgkey"
    usage.counts_file(key).write_text(content, "utf-8")
    with pytest.raises(KeyFileError, match="is damaged"):
        usage.read(key)


def test_a_milder_audit_does_not_hide_a_worse_one(tmp_path: Path) -> None:
    key = tmp_path / "key"
    usage.record_audit(key, {"same": {"10 %": 1000, "50 %": 4000}}, 8000)
    found = usage.record_audit(key, {"same": {"10 %": 2000, "25 %": 3000, "50 %": 3500}, "other": {"10 %": 7000}}, 6000)
    assert found.spent == {"same": {"10 %": 1000, "25 %": 3000, "50 %": 3500}, "other": {"10 %": 7000}}
    assert list(found.spent["same"]) == ["10 %", "25 %", "50 %"]
    assert found.measured == 8000


def test_each_audit_is_remembered_with_what_it_found(tmp_path: Path) -> None:
    key = tmp_path / "key"
    usage.record_audit(key, {}, 0)
    assert "audits" not in usage.counts_file(key).read_text("utf-8"), "as earlier versions wrote it"
    usage.record_audit(
        key, {"same": {"10 %": 1000}}, 8000, usage.audit_record(30, 0.8, float("nan"), is_finished=False)
    )
    usage.record_audit(key, {}, 0, usage.audit_record(40, 0.9, 0.5, is_finished=True))
    first, second = usage.read(key).audits
    assert (first["texts"], first["tokens"], first["content"], first["finished"]) == (30, 0.8, None, False)
    assert (second["texts"], second["tokens"], second["content"], second["finished"]) == (40, 0.9, 0.5, True)
    assert 0 < first["at"] <= second["at"]
    assert (usage.read(key).measured, usage.read(key).spent) == (8000, {"same": {"10 %": 1000}})
    for _ in range(usage.MAX_AUDITS):
        usage.record_audit(key, {}, 0, second)
    assert len(usage.read(key).audits) == usage.MAX_AUDITS
