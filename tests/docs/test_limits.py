"""The list of limits is what the code refuses."""

import re
from pathlib import Path

import pytest
from limit_tables import NOT_HERE, SITUATIONS, finding_rows, limit_rows, model_rows, policy_rows

from coldsnap import errors
from coldsnap.drivers.criu import GHOST_LIMIT_BYTES
from coldsnap.engines.sglang import arguments as sglang_arguments
from coldsnap.engines.vllm import arguments

TEXT = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
DOCTOR = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()


def section(title, text=TEXT):
    return re.split(rf"^##+ {title}$", text, flags=re.MULTILINE)[1].split("\n#")[0]


def rows_of(title, text=TEXT):
    """Return the rows of the only table of a section, without its two head lines."""
    lines = [line for line in section(title, text).splitlines() if line.startswith("|")]
    return [
        tuple(cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        for line in lines[2:]
    ]


def matches(pattern, text):
    """Tell whether a text contains a sentence of the document, in which ``…`` stands for anything."""
    return re.search(".+?".join(map(re.escape, pattern.split("…"))), text, re.DOTALL) is not None


SENTENCES = {row[0]: row for title in ("Machines and placements", "Launches", "Restores") for row in rows_of(title)}


@pytest.mark.parametrize(
    ("title", "rows"),
    [
        ("Policy values", policy_rows()),
        ("vLLM arguments", limit_rows(arguments.ARGUMENTS.rows)),
        ("vLLM environment", limit_rows(arguments.ENVIRONMENT.rows)),
        ("SGLang arguments", limit_rows(sglang_arguments.ARGUMENTS.rows)),
        ("SGLang environment", limit_rows(sglang_arguments.ENVIRONMENT.rows)),
        ("Models", model_rows()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_of_the_document_is_the_table_of_the_code(title, rows):
    assert rows_of(title) == list(rows)


def test_every_situation_is_in_the_document_and_the_other_way_round():
    assert list(SENTENCES) == list(SITUATIONS)


@pytest.mark.parametrize("what", SENTENCES)
def test_a_situation_is_refused_with_the_error_and_the_sentence_of_the_document(what):
    _, error, sentence = SENTENCES[what]

    with pytest.raises(errors.ColdSnapError) as refusal:
        SITUATIONS[what]()

    assert type(refusal.value) is getattr(errors, error)
    assert matches(sentence, str(refusal.value))


def test_what_is_not_in_this_version_is_all_of_what_is_tried_here():
    assert [what for what, _, _ in rows_of("Not in this version")] == list(NOT_HERE)


@pytest.mark.parametrize(("what", "error", "_"), rows_of("Not in this version"))
def test_what_is_not_in_this_version_is_refused_with_the_error_of_the_document(what, error, _):
    with pytest.raises(errors.ColdSnapError) as refusal:
        NOT_HERE[what]()

    assert type(refusal.value) is getattr(errors, error)


def test_the_table_of_the_doctor_is_the_table_of_the_code():
    assert rows_of("Findings", DOCTOR) == list(finding_rows())


def test_the_limit_of_unlinked_files_is_the_drivers():
    assert f"an unlinked file above {GHOST_LIMIT_BYTES >> 20} MiB" in DOCTOR


def test_every_error_that_the_document_names_exists():
    named = set(re.findall(r"`(\w+Error)`", TEXT))

    assert named <= set(errors.__all__)
    assert {"UnsupportedError", "AdmissionError", "CompatibilityError", "ContractError"} <= named
