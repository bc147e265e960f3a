"""Names, places and numbers are masked by Presidio, offline, and nothing else is changed."""

from __future__ import annotations

import csv
import json
import logging
import socket
from pathlib import Path

import pytest

from milkglass.rows.blocks import row_format_of
from milkglass.sanitizers import masking
from milkglass.sanitizers.masking import LanguageTally, analyzer, mask_file, masked_parts, private_spans
from tests.cli.kit import call, document, refused

TEXT = "My patient Maria Keller in Basel is HIV positive, call 555-0142-555 or maria@clinic.org on 3 May 2024."


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


def masked(text: str, least: float = 0.35) -> str:
    return "".join(masked_parts(text, least)[1])


def test_what_is_recognised_is_masked_and_the_rest_stays() -> None:
    found = masked(TEXT)
    assert not any(one in found for one in ("Maria", "Keller", "Basel", "555-0142", "clinic.org", "May"))
    assert "<PERSON>" in found and "<LOCATION>" in found and "<EMAIL_ADDRESS>" in found
    assert "HIV positive" in found, "Presidio has no recognizer of diseases: what it misses crosses"


def test_parts_are_the_text_and_masks_stand_for_whole_entities() -> None:
    for text in (TEXT, "", "no name here", "Maria Keller", TEXT * 3, "é ü 漢字 \x00 Anna\tBasel"):
        before, after = masked_parts(text, 0.35)
        assert "".join(before) == text and len(before) == len(after)
        assert all(
            new == old or (new.startswith("<") and new.endswith(">")) for old, new in zip(before, after, strict=True)
        )
    assert all(a[1] <= b[0] for a, b in zip(private_spans(TEXT, 0.0), private_spans(TEXT, 0.0)[1:], strict=False)), (
        "none overlap"
    )


def test_a_higher_score_masks_less() -> None:
    assert masked(TEXT, 0.9).count("<") < masked(TEXT, 0.35).count("<") <= masked(TEXT, 0.0).count("<")


def test_a_long_text_is_masked_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = masked(TEXT)
    monkeypatch.setattr(masking, "MAX_CHARACTERS", 100)
    text = f"{TEXT}\n" * 5 + "x" * 250
    borders = [*masking._part_borders(text)]
    assert "".join(text[start:end] for start, end in borders) == text
    assert max(end - start for start, end in borders) <= 100
    found = masked(text)
    assert found.endswith("x" * 250) and found.count("<PERSON>") >= 4 * whole.count("<PERSON>") > 0
    original, replaced = masking.masked_parts(text, 0.35)
    assert "".join(original) == text and "".join(replaced) == found
    card = "I have paid the bill by card, and it is 4111 1111 1111 1111, as I told you the day before"
    assert masked(card).count("<CREDIT_CARD>") == 1
    for limit in range(40, 60):
        monkeypatch.setattr(masking, "MAX_CHARACTERS", limit)
        assert masked(card).count("<CREDIT_CARD>") == 1, "whole, wherever a part ends"


def test_nothing_is_logged_of_a_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    analyzer()
    masked("Secretname Kowalczyk lives in Gdansk")
    assert "Kowalczyk" not in caplog.text


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".txt"])
def test_a_file_keeps_its_shape(suffix: str, tmp_path: Path) -> None:
    source, out = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    rows = [{"text": TEXT, "label": "a"}, {"text": 'She said "no", and left', "label": "b"}]
    if suffix == ".csv":
        with source.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, ["text", "label"])
            writer.writeheader()
            writer.writerows(rows)
    else:
        source.write_text(
            "".join((json.dumps(row) if suffix == ".jsonl" else row["text"]) + "\n" for row in rows), "utf-8"
        )
    report = mask_file(source, row_format_of(source), out, 0.35)
    assert report["texts"] == 2 and report["texts with a mask"] == 1 and report["masks"]["<PERSON>"] == 1
    text = out.read_text("utf-8")
    assert "Keller" not in text and "and left" in text
    if suffix == ".csv":
        assert [row["label"] for row in csv.DictReader(text.splitlines())] == ["a", "b"]
    assert json.loads((tmp_path / f"out{suffix}.report.json").read_text("utf-8"))["masks"] == report["masks"]


def test_the_command_masks_and_refuses_what_it_has_no_use_for(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"text": TEXT}) + "\n", "utf-8")
    start = ("sanitize", source, tmp_path / "out.jsonl", "--method", "mask")
    for more, value in (("--epsilon", "3"), ("--seed", "1"), ("--by", "tokens")):
        refused(call(*start, more, value), 2, more.removeprefix("--"))
    refused(call(*start, "--set", "least=2"), 2, "'2'")
    refused(call(*start, "--set", "most=1"), 2, "most")
    refused(call("sanitize", "-", "--method", "mask"), 2, "file")
    found = document(call(*start, "--json"))
    assert found["masks"]["<PERSON>"] == 1 and "Keller" not in (tmp_path / "out.jsonl").read_text("utf-8")
    refused(call(*start), 2, "out.jsonl")


GERMAN = (
    "Die Rechnung für den Monat Mai ist noch nicht bezahlt worden, sagt Frau Keller.",
    "Bitte überweisen Sie den Betrag bis zum Ende der Woche an unsere Kasse in Bern.",
    "Was soll ich tun, wenn das Gerät nach dem Einschalten nicht mehr startet?",
    "Ich war sehr enttäuscht und möchte mein Geld so bald wie möglich zurück.",
    "Wir haben am Montag um neun einen Termin in der Wohnung meiner Mutter.",
    "Der Arzt hat mir gegen die Schmerzen ein anderes Mittel verschrieben.",
    "Unser Nachbar hat gestern wieder bis spät in die Nacht Musik gehört.",
    "Nach der Prüfung gehen alle zusammen in das kleine Lokal am Bahnhof.",
)
ENGLISH = (
    "The bill for May has not been paid yet, says Ms Keller from the office.",
    "Please send the amount to our account in Bern by the end of the week.",
    "What should I do if the device does not start after I switch it on?",
    "I was very disappointed and would like to have my money back soon.",
    "We have an appointment at nine on Monday in the flat of my mother.",
    "The doctor gave me another drug for the pain and told me to rest.",
    "Our neighbour played music until late into the night once again.",
    "After the exam we all go to the small place next to the station.",
)


def test_texts_in_another_language_are_noticed_and_a_few_words_are_not() -> None:
    assert "English function words" in LanguageTally.of(GERMAN * 2).note()
    assert "English function words" in LanguageTally.of(["会議は月曜日です。" + " 東京 駅 会議"] * 40).note()
    assert LanguageTally.of(["我们星期一在北京开会"] * 20).note(), "no blanks stand between its words"
    assert LanguageTally.of(ENGLISH * 2).note() == "" and LanguageTally.of(GERMAN[:1]).note() == ""
    assert LanguageTally.of([]).note() == ""


def test_the_command_says_that_masks_are_made_for_english(tmp_path: Path) -> None:
    for name, texts, is_noticed in (("de", GERMAN * 2, True), ("en", ENGLISH * 2, False)):
        source = tmp_path / f"{name}.txt"
        source.write_text("".join(f"{text}\n" for text in texts), "utf-8")
        done = call("sanitize", source, tmp_path / f"{name}-out.txt", "--method", "mask")
        assert done.exit_code == 0 and ("English" in done.stderr) is is_noticed


def test_some_texts_in_another_language_are_noticed_among_english_ones() -> None:
    german = " ".join(GERMAN[:2])
    assert "1," in LanguageTally.of([*ENGLISH * 4, german]).note()
    assert LanguageTally.of([*ENGLISH * 40, german]).note() == "", "a quotation is no language of the file"


def test_titles_without_a_sentence_show_no_language() -> None:
    titles = ("Printer offline error code E05 return 12", "Invoice March missing", "VPN login failure laptop Bern")
    assert LanguageTally.of(titles * 40).note() == ""
    long_title = " ".join(titles * 3)
    assert LanguageTally.of([*ENGLISH * 3, long_title]).note() == ""
    for text in (
        "Nie mogę się zalogować na swoje konto",
        "Saya tidak bisa masuk ke akun saya",
        "لا أستطيع الدخول إلى حسابي",
    ):
        assert LanguageTally.of([text] * 40).note(), text


def test_hashtags_users_names_and_addresses_show_no_language() -> None:
    tags = "#MondayBlues #CoffeeTime #Bern @keller_ann @fritz #OfficeLife #Sunrise #Trains https://example.org/a-b-c-d"
    tweets = [f"Late again {tags} {tags}", *ENGLISH * 3]
    assert LanguageTally.of(tweets).note() == ""
    german = [f"{text} {tags}" for text in GERMAN * 2]
    assert "English function words" in LanguageTally.of(german).note()


def test_the_command_says_which_fields_stay_and_refuses_an_instruction_that_no_text_has(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"text": TEXT, "name": "Maria Keller", "label": 1}) + "\n", "utf-8")
    wrong = ("--instruction", "Summarise:")
    refused(call("sanitize", source, tmp_path / "no.jsonl", "--method", "mask", *wrong), 5, "instruction")
    done = call("sanitize", source, tmp_path / "out.jsonl", "--method", "mask")
    assert done.exit_code == 0 and "unchanged: label, name" in done.stdout
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text("utf-8"))
    assert report["fields_left_as_they_are"] == ["label", "name"]
