"""Documents belong together: links lead somewhere, lists are complete, and nothing speaks of one machine."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "examples" / "README.md"]
NOTEBOOK = json.loads((ROOT / "examples" / "qualification.ipynb").read_text())


def name(path):
    return str(path.relative_to(ROOT))


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Return the anchors of a document's headings, as they are made of Markdown: lower case, spaces to hyphens."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_index_names_every_document():
    index = (ROOT / "docs" / "index.md").read_text()
    top = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}

    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == top


@pytest.mark.parametrize("directory", ["docs/decisions", "docs/format"])
def test_the_first_page_of_a_directory_names_every_other(directory):
    named = set(re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / directory / "README.md").read_text()))

    assert {path.name for path in (ROOT / directory).glob("*.md")} - {"README.md"} <= named


def test_the_page_of_examples_names_every_example():
    named = set(re.findall(r"\]\(([\w.-]+)\)", (ROOT / "examples" / "README.md").read_text()))

    assert {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")} <= named


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "decisions").glob("0*.md")), ids=name)
def test_a_decision_is_short_and_says_what_was_not_taken(path):
    text = path.read_text()

    assert len(text.splitlines()) <= 25
    assert re.findall(r"^\*\*(.+?)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Not taken", "Evidence"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_a_path_of_the_repository_that_a_document_names_exists(path):
    for target in re.findall(r"`((?:tests|examples|tools)/[\w/.-]+)`", path.read_text()):
        assert (ROOT / target).exists(), target


def test_the_words_are_in_order():
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[2:]

    assert words == sorted(words)


def test_the_sessions_that_the_documents_name_exist():
    sessions = {
        node.name for node in ast.parse((ROOT / "noxfile.py").read_text()).body if isinstance(node, ast.FunctionDef)
    }
    named = {found for path in DOCUMENTS for found in re.findall(r"nox -s (\w+)", path.read_text())}

    assert named <= sessions
    assert {"quickstart", "notebook"} <= named


def test_the_figures_of_the_readme_have_the_rows_that_the_quickstart_prints():
    figures = (ROOT / "README.md").read_text().split("<!-- figures: quickstart -->")[1].split("```")[1]
    printed = re.findall(r'^        \("([^"]+)", f?"', (ROOT / "examples" / "quickstart.py").read_text(), re.MULTILINE)

    assert [line[:42].strip() for line in figures.splitlines()[3:]] == printed


# The notebook as it is kept.


def test_the_notebook_is_kept_without_outputs():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]

    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(cell["metadata"] == {} for cell in NOTEBOOK["cells"])
    assert set(NOTEBOOK["metadata"]) == {"kernelspec", "language_info"}


def test_the_notebook_names_no_path_of_a_machine():
    text = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"])

    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|usr|opt|var|work|Users)\b\S*", text) == []


def test_nothing_that_is_kept_names_a_path_of_this_checkout():
    kept = subprocess.run(["git", "-C", ROOT, "ls-files", "*.md", "*.ipynb"], capture_output=True, text=True).stdout

    for path in kept.split():
        assert str(ROOT) not in (ROOT / path).read_text(), path
