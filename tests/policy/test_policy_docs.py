"""What the documents say of the policy and of environment names is what the tables say."""

import json
import re
from pathlib import Path

import pytest

from coldsnap.engines.settings import INHERITED, SETTINGS
from coldsnap.errors import PolicyError
from coldsnap.policy import Policy, leaves
from coldsnap.policy.explain import shown

DOCS = Path(__file__).parents[2] / "docs"
POLICY = (DOCS / "policy.md").read_text()
NAMES = (DOCS / "settings.md").read_text()


def rows_of(text):
    """Return the rows of the one table of a document, without its two head lines."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]
    ]


def code(text):
    return f"`{text}`" if text else ""


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", POLICY, re.DOTALL)


def test_the_table_of_leaves_in_the_document_is_the_table_of_the_code():
    assert rows_of(POLICY) == [
        [code(row.path), row.type, code(shown(row, row.default)), row.allowed, row.doc] for row in leaves()
    ]


def test_the_table_of_names_in_the_document_is_the_table_of_the_code():
    assert rows_of(NAMES) == [
        [
            code(row.name),
            code(row.path),
            row.owner,
            row.engine,
            code(row.default),
            "yes" if row.implemented else "no",
            row.meaning,
        ]
        for row in SETTINGS
    ]


def test_the_document_lists_what_an_engine_inherits():
    listed = NAMES.split("ends up in its image: ")[1].split(".\n")[0]

    assert set(re.findall(r"`([^`]+)`", listed)) == INHERITED | {"LC_*"}


@pytest.mark.parametrize("text", blocks("toml"))
def test_the_toml_samples_are_policies(text):
    assert Policy.from_toml(text).explicit


@pytest.mark.parametrize("text", blocks("json"))
def test_the_json_samples_are_policies(text):
    assert Policy.from_json(text).to_data() == json.loads(text)


@pytest.mark.parametrize("text", blocks("python"))
def test_the_python_samples_run(text):
    names = {}
    exec(text, names)

    assert names["policy"].explicit


def test_the_sample_of_an_error_is_the_error(tmp_path):
    (sample,) = blocks("text")
    (tmp_path / "policy.toml").write_text('[io]\nqueue_dept = 8\nchunk_bytes = "4096"\nhydration_backend = "gds"\n')

    with pytest.raises(PolicyError) as caught:
        Policy.load(tmp_path / "policy.toml")

    assert str(caught.value).replace(f"{tmp_path}/", "") == sample.strip()
