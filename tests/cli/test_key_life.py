"""`milkglass key show`, `backup` and `rotate`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from milkglass import files
from milkglass.client.key import usage
from milkglass.client.key.file import UnlockedKey, read_key, write_key
from milkglass.errors import KeyExists, KeyFileError, WrongPassphrase
from tests.cli.kit import PASSPHRASE, SECRET, Owner, call, document, refused

FRESH = "seven quite different passphrase words"


@pytest.fixture
def owner(encoder: Owner) -> Owner:
    encoder.reset()
    return encoder


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    file = tmp_path / "new-passphrase"
    file.write_text(FRESH)
    file.chmod(0o600)
    return file


def test_show_names_what_a_key_is_of_and_no_secret(owner: Owner, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"text": "the nurse calls", "label": "{SECRET}"}}\n{{"text": "a dog", "label": "other"}}\n')
    assert call("encode", "--key", owner.path, "--in", rows, "--out", tmp_path / "ids.jsonl").exit_code == 0
    shown = call("key", "show", owner.path)
    answer = document(call("key", "show", owner.path, "--json"))
    assert answer["key_id"] == owner.key.identifier in shown.stdout
    assert answer["model"] == str(owner.model) and answer["model_digest"] == owner.key.model_digest
    assert answer["scheme"]["name"] == "obfuslm" and answer["kind"] == owner.about["kind"]
    assert answer["tokens"] == len(owner.key.first_ids) and answer["made_for_job"] is None
    for secret in (SECRET, owner.key.root.hex(), PASSPHRASE):
        assert secret not in shown.stdout + shown.stderr and secret not in str(answer)
    wrong = call("key", "show", owner.path, passphrase="wrong")
    refused(wrong, 4, "the passphrase is wrong (it was taken from MILKGLASS_PASSPHRASE)")


def test_show_counts_label_names_and_names_the_job(owner: Owner, tmp_path: Path) -> None:
    child = tmp_path / "march.mgkey"
    document(call("key", "for-job", owner.path, "march", "--out", child, "--json"))
    assert document(call("key", "show", child, "--json"))["made_for_job"] == "march"
    assert document(call("key", "show", child, "--json"))["label_names"] == 0


def test_a_backup_opens_and_is_never_written_over(owner: Owner, tmp_path: Path) -> None:
    copy = tmp_path / "copy.mgkey"
    answer = document(call("key", "backup", owner.path, copy, "--json"))
    assert answer["key_id"] == read_key(copy, PASSPHRASE).identifier == owner.key.identifier
    assert copy.read_bytes() == owner.path.read_bytes() and copy.stat().st_mode & 0o077 == 0
    assert answer["sha256"] == hashlib.sha256(copy.read_bytes()).hexdigest()
    refused(call("key", "backup", owner.path, copy), 4, "exists already")
    refused(call("key", "backup", owner.path, owner.path), 4, "exists already")
    refused(call("key", "backup", owner.path, tmp_path / "other", passphrase="wrong"), 4, "the passphrase is wrong")
    assert not (tmp_path / "other").exists()


def test_a_backup_into_a_folder_keeps_the_name(owner: Owner, tmp_path: Path) -> None:
    (tmp_path / "stick").mkdir()
    assert call("key", "backup", owner.path, tmp_path / "stick").exit_code == 0
    assert (tmp_path / "stick" / owner.path.name).read_bytes() == owner.path.read_bytes()
    missing = tmp_path / "absent" / "copy.mgkey"
    refused(call("key", "backup", owner.path, missing), 2, "there is no folder")


def test_rotate_changes_the_passphrase_and_not_the_key(owner: Owner, fresh: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(PASSPHRASE)
    before = owner.path.read_bytes()
    run = ("key", "rotate", owner.path, "--passphrase-file", old, "--new-passphrase-file", fresh)
    result = call(*run, passphrase=None)
    assert result.exit_code == 0 and "still open with the old passphrase" in result.stderr, result.stderr
    assert FRESH not in result.stdout + result.stderr
    same = read_key(owner.path, FRESH)
    assert same.identifier == owner.key.identifier and same.root == owner.key.root and same.info == owner.key.info
    with pytest.raises(KeyFileError):
        read_key(owner.path, PASSPHRASE)
    assert owner.path.read_bytes()[:64] != before[:64]  # another salt
    assert owner.path.stat().st_mode & 0o077 == 0
    owner.reset()


def test_rotate_refuses_the_old_passphrase_as_the_new_one(owner: Owner, tmp_path: Path) -> None:
    before = owner.path.read_bytes()
    refused(call("key", "rotate", owner.path), 2, "MILKGLASS_PASSPHRASE holds the old passphrase")
    same = tmp_path / "same"
    same.write_text(PASSPHRASE)
    same.chmod(0o600)
    refused(call("key", "rotate", owner.path, "--new-passphrase-file", same), 2, "the new passphrase is the old one")
    assert owner.path.read_bytes() == before


def test_rotate_refuses_a_weak_passphrase_and_keeps_the_key(owner: Owner, tmp_path: Path) -> None:
    weak, before = tmp_path / "weak", owner.path.read_bytes()
    weak.write_text("password1")
    result = call("key", "rotate", owner.path, "--new-passphrase-file", weak)
    assert result.exit_code == 4 and "password1" not in result.stderr and owner.path.read_bytes() == before
    none = tmp_path / "none"
    refused(call("key", "rotate", owner.path, "--new-passphrase-file", none), 2, "no passphrase file")
    assert owner.path.read_bytes() == before


def test_rotate_draws_a_passphrase(owner: Owner, tmp_path: Path) -> None:
    drawn = tmp_path / "drawn"
    result = call("key", "rotate", owner.path, "--generate", "--new-passphrase-file", drawn)
    assert result.exit_code == 0, result.stderr
    words = drawn.read_text().strip()
    assert len(words.split("-")) >= 10 and words not in result.stdout + result.stderr
    assert read_key(owner.path, words).identifier == owner.key.identifier
    owner.reset()


def test_what_a_killed_rotation_left_is_removed_and_named(owner: Owner, fresh: Path, tmp_path: Path) -> None:
    name = owner.path.name
    left = [owner.path.with_name(f".{name}.0123abcd.tmp"), owner.path.with_name(f"..{name}.usage.json.0123abcd.tmp")]
    others = [owner.path.with_name(f".other-{name}.0123abcd.tmp"), owner.path.with_name(f".{name}.mine.tmp")]
    for one in (*left, *others):
        one.write_bytes(owner.path.read_bytes())
    old = tmp_path / "old"
    old.write_text(PASSPHRASE)
    refused(call("key", "show", owner.path, passphrase="wrong"), 4, "the passphrase is wrong")
    assert all(one.exists() for one in left), "nothing is removed for someone who cannot open the key"
    result = call(
        "key", "rotate", owner.path, "--passphrase-file", old, "--new-passphrase-file", fresh, passphrase=None
    )
    assert result.exit_code == 0 and not any(one.exists() for one in left) and all(one.exists() for one in others)
    assert all(f"removed {one}" in result.stderr for one in left)
    left[0].write_bytes(b"cut off")
    with usage.exclusive_lock(owner.path):  # it is another command's, and being written
        assert read_key(owner.path, FRESH).identifier == owner.key.identifier and left[0].exists()
    assert call("key", "show", owner.path, passphrase=FRESH).exit_code == 0 and not left[0].exists()
    for one in others:
        one.unlink()
    owner.reset()


def test_a_link_that_leads_nowhere_is_no_place_for_a_new_key(owner: Owner, fresh: Path, tmp_path: Path) -> None:
    link, target = tmp_path / "new.mgkey", tmp_path / "elsewhere"
    link.symlink_to(target)
    for words in (
        ("key", "for-job", owner.path, "march", "--out", link),
        ("key", "for-codec", owner.path, "--out", link, "--new-passphrase-file", fresh),
        ("key", "backup", owner.path, link),
        ("obfuscate", owner.model, tmp_path / "out", "--key", link),
    ):
        refused(call(*words), 4, "is a link that leads nowhere")
    with pytest.raises(KeyExists):
        write_key(link, owner.key, FRESH)
    with pytest.raises(FileExistsError):
        files.write(link, "new", replace=False)
    assert link.is_symlink() and not target.exists()


def test_an_opened_key_keeps_no_passphrase_and_seals_again_under_it(owner: Owner) -> None:
    opened = UnlockedKey.open(owner.path, PASSPHRASE)
    kept = [opened, opened.seal, *vars(opened).values(), *vars(opened.seal).values()]
    assert not any(PASSPHRASE in str(one) or (isinstance(one, bytes) and PASSPHRASE.encode() in one) for one in kept)
    first = owner.path.read_bytes()
    named = opened.remember({"care": 0, "time": 1}, "ftjob-7").remember({"care": 0, "day": 1}, "ftjob-8")
    assert read_key(owner.path, PASSPHRASE).info == named.key.info
    one, other = (json.loads(data.partition(b"\n")[0]) for data in (first, owner.path.read_bytes()))
    assert one["nonce"] != other["nonce"] and one["kdf"] == other["kdf"]
    with pytest.raises(WrongPassphrase):
        read_key(owner.path, FRESH)
    owner.reset()  # another salt, as a rotation draws it
    with pytest.raises(WrongPassphrase, match="after it was opened"):
        opened.remember({"care": 1, "time": 0})
